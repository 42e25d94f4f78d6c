// A link by which others see or hear a session, and change nothing.
import { request } from "./connection.js";
import { base, find, key } from "./frame.js";

/** The session that the page's address shows, and its token; null on a page of one's own. */
export const WATCHED = /^#watch=([\w-]+)\.([\w-]+)$/.exec(location.hash);

addEventListener("hashchange", () => location.reload()); // another link, for which a browser keeps the page

const LOOPBACK = /^(localhost|127\.[\d.]+|\[::1\])$/;

/** Let the button Share open its sheet, with a link to the session whose id `session()` says. */
export function share(stage, session) {
  document.body.classList.toggle("watching", Boolean(WATCHED));
  find("link-copy").onclick = async () => {
    find("link-text").select();
    const copied = await navigator.clipboard?.writeText(find("link-text").value).then(() => true, () => false);
    find("link-copy").textContent = copied ? "Copied" : "Copy by hand";
  };
  return async () => {
    const link = await linkTo(session());
    find("link-text").value = link;
    find("link-copy").textContent = "Copy";
    find("link-near").hidden = !LOOPBACK.test(link.hostname);
    stage.open("link");
    find("link-text").select();
  };
}

/** A new link to a session. Where a gateway answers, it leads to the page of the server that has the session. */
async function linkTo(id) {
  const { url, watch: token } = await request(base, `v1/sessions/${id}/watch`, key(), undefined, {}, "POST");
  const server = /^(?:ws(s?):)(.*)v1\/sessions\//.exec(url);
  return new URL(`#watch=${id}.${token}`, server ? `http${server[1]}:${server[2]}` : location.href);
}
