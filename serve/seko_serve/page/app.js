// The page: controls, keys, figures. The worker decodes and paints; the connection talks to the server.
import { Connection } from "./connection.js";

const find = (id) => document.getElementById(id);
const base = new URL("./", location.href);
const STEERING = ["KeyW", "KeyA", "KeyS", "KeyD", "KeyI", "KeyJ", "KeyK", "KeyL"];
const ARROWS = { ArrowUp: "KeyI", ArrowLeft: "KeyJ", ArrowDown: "KeyK", ArrowRight: "KeyL" };
const worker = new Worker(new URL("./player.js", import.meta.url), { type: "module" });
const offscreen = find("video").transferControlToOffscreen();
worker.postMessage({ canvas: offscreen }, [offscreen]);

let connection, paused = false, recorder;
const held = new Set();
const sent = new Map(); // by id: when a control was sent, and the chunk that follows it
const times = []; // when the last frames were painted

async function supported() {
  const found = [];
  if ("VideoDecoder" in window) {
    for (const [name, codec] of [["h264", "avc1.42E01F"], ["vp8", "vp8"]]) {
      try {
        if ((await VideoDecoder.isConfigSupported({ codec, optimizeForLatency: true })).supported) found.push(name);
      } catch { /* an unknown codec */ }
    }
  }
  return [...found, "mjpeg"]; // pages that are not secure have no VideoDecoder
}

function say(text, error = false) {
  find("state").textContent = text;
  find("state").classList.toggle("error", error);
}

function running(now) {
  for (const id of ["pause", "restart", "record", "stop"]) find(id).disabled = !now;
  find("start").textContent = now ? "Change" : "Start";
}

function remember(prompt) {
  const line = document.createElement("li");
  const again = document.createElement("button");
  again.type = "button";
  again.textContent = prompt;
  again.onclick = () => { find("prompt").value = prompt; find("controls").requestSubmit(); };
  line.append(again);
  find("history").prepend(line);
}

function control(type, fields) {
  const id = connection?.send(type, fields);
  if (id) sent.set(id, { at: performance.now() });
}

async function start(prompt) {
  say("Opening");
  connection = new Connection(base, find("key").value);
  connection.addEventListener("media", ({ detail }) => worker.postMessage({ media: detail }, [detail]));
  connection.addEventListener("told", ({ detail }) => told(detail));
  connection.addEventListener("lost", ({ detail }) => {
    if (detail.ended) return ended();
    say("The connection was lost; trying again", true);
  });
  const session = { seed: Math.trunc(Number(find("seed").value) || 0), ...(prompt && { prompt }) };
  await connection.open(session, await supported());
  running(true);
}

function told(message) {
  if (message.type === "ready") {
    worker.postMessage({ ready: message });
    find("hint").hidden = true;
    find("pad").hidden = !message.takes.keys;
    find("prompt").disabled = !message.takes.prompt;
    say("Live");
  } else if (message.type === "applied") {
    const control = sent.get(message.id);
    if (control) control.chunk = message.chunk;
  } else if (message.type === "rejected" || message.type === "error") {
    say(message.message, true);
  } else if (message.type === "chunk" && message.late_ms > 0) {
    find("late").textContent = Number(find("late").textContent) + 1;
  } else if (message.type === "state") {
    paused = message.paused;
    find("pause").textContent = paused ? "Go on" : "Pause";
    find("pause").setAttribute("aria-pressed", paused);
    say(paused ? "Paused" : "Live");
    if (paused) worker.postMessage({ stop: true });
  }
}

function ended() {
  say("Ended");
  running(false);
  connection = undefined;
  sent.clear();
}

worker.onmessage = ({ data }) => {
  if (data.serial !== undefined && connection) connection.serial = data.serial;
  if (data.failed) say(`This browser cannot decode the video: ${data.failed}`, true);
  if (data.painted === undefined) return;
  const now = performance.now();
  times.push(now);
  while (times.length && times[0] < now - 2000) times.shift();
  find("fps").textContent = times.length > 1 ? ((times.length - 1) * 1000 / (now - times[0])).toFixed(1) : "0";
  find("buffered").textContent = data.buffered;
  find("chunk").textContent = data.chunk;
  document.body.dataset.painted = data.painted;
  document.body.dataset.frame = data.number;
  for (const [id, { at, chunk }] of sent) {
    if (chunk === undefined || chunk > data.chunk) continue;
    find("reaction").textContent = `${Math.round(now - at)} ms`;
    sent.delete(id);
  }
  if (data.shown !== undefined) connection?.send("ack", { chunk: data.shown });
};

find("controls").addEventListener("submit", async (event) => {
  event.preventDefault();
  const prompt = find("prompt").disabled ? "" : find("prompt").value.trim();
  try {
    if (connection) control("prompt", { text: prompt, recache: find("recache").checked });
    else await start(prompt);
    if (prompt) remember(prompt);
  } catch (error) {
    connection = undefined;
    say(error.message, true);
  }
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); find("controls").requestSubmit(); }
});
find("pause").onclick = () => control(paused ? "play" : "pause");
find("restart").onclick = () => control("restart", { seed: Math.trunc(Number(find("seed").value) || 0) });
find("stop").onclick = () => { connection?.close(); ended(); };
find("record").onclick = () => {
  if (recorder) { recorder.stop(); return; }
  const parts = [];
  recorder = new MediaRecorder(find("video").captureStream());
  recorder.ondataavailable = ({ data }) => parts.push(data);
  recorder.onstop = () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(parts, { type: recorder.mimeType }));
    link.download = "seko.webm";
    link.click();
    recorder = undefined;
    find("record").setAttribute("aria-pressed", false);
  };
  recorder.start();
  find("record").setAttribute("aria-pressed", true);
};

// -- keys: the set that is held, sent when it changes ---------------------------------------------------------
function hold(code, down) {
  if (!STEERING.includes(code) || held.has(code) === down) return;
  down ? held.add(code) : held.delete(code);
  for (const button of find("keys").children) button.classList.toggle("held", held.has(button.dataset.code));
  control("keys", { held: [...held] });
}
function letGo() { for (const code of [...held]) hold(code, false); }
for (const code of STEERING) {
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.code = code;
  button.textContent = code.slice(3);
  button.addEventListener("pointerdown", (event) => { button.setPointerCapture(event.pointerId); hold(code, true); });
  for (const end of ["pointerup", "pointercancel"]) button.addEventListener(end, () => hold(code, false));
  find("keys").append(button);
}
document.addEventListener("keydown", (event) => {
  if (find("pad").hidden || event.target.matches("textarea, input") || event.repeat) return;
  const code = ARROWS[event.code] ?? event.code;
  if (STEERING.includes(code)) { event.preventDefault(); hold(code, true); }
});
document.addEventListener("keyup", (event) => hold(ARROWS[event.code] ?? event.code, false));
window.addEventListener("blur", letGo);
document.addEventListener("visibilitychange", () => { if (document.hidden) letGo(); });
window.addEventListener("pagehide", () => connection?.close());

fetch(new URL("ready", base)).then((answer) => answer.json()).then(({ capacity }) => {
  find("model").textContent = `${capacity} ${capacity === 1 ? "session" : "sessions"}`;
}).catch(() => say("The server does not answer", true));
