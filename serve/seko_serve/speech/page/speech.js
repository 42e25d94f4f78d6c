// The page of a model that speaks: what is typed goes to the server as it is written, and is heard as it comes.
import { AWAY, Connection, Watch, admitted, answered, sentence } from "./connection.js";
import { base, block, complain, fail, find, key, say, servedModel, unblock } from "./frame.js";
import { wholeSeed } from "./prompts.js";
import { save as saveFile } from "./recorder.js";
import { WATCHED, share } from "./share.js";
import { Sound, playable } from "./sound.js";
import { Stage } from "./stage.js";
import { dataUrl } from "./uploads.js";

const BUFFER = 8; // chunks that may come before they are heard
const BARS = 320, SAVE_TRIES = 10;
const PAUSE_MS = 1000; // of who writes, until an unfinished word is said
// Behind one of these a word is finished: a space, a mark or a letter of a script that has no spaces.
const FINISHES = /[\s、。，！？：；\p{Script=Han}\p{Script=Hira}\p{Script=Kana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Mymr}]/gu;

let model, connection, sound, voice, begun = false, trying;
let sent = ""; // of the text: what the server was sent
const unheard = new Map(); // by id, what no receipt came of: the text that was sent before it, and whether it ended
let pause; // of who writes: a timer
let written; // when the piece was sent whose sound has not come
let samples = 0, started = false;
let waiting = []; // chunks that came and were not heard: { chunk, end } in microseconds
let hushed; // the control behind which sound is heard again
const bars = [];

const stage = new Stage(() => true); // who writes needs what is there
const shared = share(stage, () => connection.id);
find("share").onclick = () => attempted(shared);

async function attempted(action) {
  try {
    await action();
  } catch (error) {
    if (begun || model && error.code === undefined) {
      if (!begun) say("Ready");
      complain(error.message);
    } else fail(error, { "Try again": () => attempted(async () => { if (!model) await meet(); await start(); }) });
  }
}

function showRunning(now) {
  for (const id of ["again", "hush"]) find(id).disabled = !now;
  find("start").hidden = now;
  find("say").hidden = !now;
  find("share").hidden = !now;
}

async function meet() {
  model = await servedModel();
  find("access").hidden = true;
  unblock();
  find("model").textContent = `${model.id}, ${model.rate / 1000} kHz`;
  find("start").disabled = find("save").disabled = false;
  find("text").disabled = false;
  find("text").maxLength = model.limits.waiting_letters;
  find("words").maxLength = model.limits.text_letters;
  say("Ready");
  find("text").focus();
}

/** Hear the session of another. */
async function hear() {
  const audio = await playable();
  if (!audio.length) throw new Error("Sound needs a page over https, or on localhost");
  say("Opening", "wait");
  connection = new Watch(base, WATCHED[1], WATCHED[2]);
  listen(connection);
  connection.open({ codecs: [], audio });
}

async function start() {
  const mine = trying = new AbortController();
  try {
    await enter(mine.signal);
  } finally {
    if (trying === mine) trying = undefined;
  }
}

async function enter(signal) {
  const audio = await playable();
  if (!audio.length) throw new Error("Sound needs a page over https, or on localhost");
  if (signal.aborted) return;
  const waits = (text) => {
    say(text, "wait");
    block(text, { "Stop waiting": giveUp }, "wait");
  };
  waits("Opening");
  await admitted(base, key(), async (place) => {
    const words = find("words").value.trim();
    const session = {
      model: model.id,
      seed: Math.max(0, wholeSeed(find("seed").value)),
      ...(voice && { voice, ...(words && { voice_text: words }) }), // as it is now: it may have been chosen in line
    };
    const mine = new Connection(base, key(), BUFFER);
    connection = mine;
    listen(mine);
    try {
      await mine.open(session, { codecs: [], audio }, place);
    } catch (error) {
      if (connection === mine) connection = undefined;
      throw error;
    }
  }, waits, signal);
}

/** Take what a connection tells, for as long as it is the page's own. */
function listen(mine) {
  unheard.clear();
  [sent, samples, started, begun, written, waiting] = ["", 0, false, false, undefined, []];
  mine.addEventListener("media", ({ detail: { media } }) => { if (mine === connection) heard(media); });
  mine.addEventListener("told", ({ detail }) => { if (mine === connection) told(detail); });
  mine.addEventListener("lost", ({ detail }) => {
    if (mine !== connection) return;
    if (detail.ended) ended(detail.reason);
    else {
      const text = `${detail.reason ?? "The connection was lost"}. Trying again`;
      say(text, "error");
      block(text, { "Try now": () => mine.hurry(), End: giveUp }, "wait");
    }
  });
}

/** Give up the try to open a session. */
function giveUp() {
  connection?.close();
  ended();
}

function ended(reason) {
  trying?.abort();
  connection = trying = undefined;
  begun = false;
  sound?.close();
  sound = undefined;
  showRunning(false);
  say(reason ?? "Ended", reason && "error");
  if (reason) block(reason, WATCHED ? { "Try again": () => attempted(hear) } : { "Start again": () => attempted(start) });
  else unblock();
}

function told(message) {
  if (message.type === "ready") {
    if (!begun) {
      sound?.close();
      sound = new Sound(message.audio, (clock, peak) => played(clock.pts, peak));
      sound.start();
      find("late").textContent = 0;
    }
    begun = true;
    hushed = undefined;
    showRunning(true);
    unblock();
    say("Listening", "live");
    writeAgain();
  } else if (message.type === "received") {
    unheard.delete(message.id);
  } else if (message.type === "rejected" || message.type === "error") {
    unheard.delete(message.id);
    if (message.id === hushed) hushed = undefined;
    complain(sentence(message.message));
  } else if (message.type === "applied") {
    if (message.id === hushed) hushed = undefined;
    if (message.note) complain(sentence(message.note));
  } else if (message.type === "chunk") {
    if (message.late_ms > 0 && started) find("late").textContent = Number(find("late").textContent) + 1;
    if (hushed) connection.send("ack", { chunk: message.chunk });
    else waiting.push({ chunk: message.chunk, end: samples / sound.facts.rate * 1e6 });
  }
}

function heard(media) {
  if (!media.count) return;
  samples = media.first + media.count;
  started = !media.last;
  if (!hushed) sound.take(media);
  if (written !== undefined) {
    find("reaction").textContent = `${Math.round(performance.now() - written)} ms`;
    written = undefined;
  }
  document.body.dataset.samples = samples;
}

/** The sound stands at a time: acknowledge what was heard up to there, and draw how loud it is. */
function played(pts, peak) {
  // What a decoder holds back is heard with what comes next: the last packets count as heard a little early.
  let shown;
  while (waiting.length && waiting[0].end <= pts + 100_000) shown = waiting.shift().chunk;
  if (shown !== undefined) connection?.send("ack", { chunk: shown });
  find("spoken").textContent = `${Math.max(0, pts / 1e6).toFixed(1)} s`;
  document.body.dataset.heard = Math.max(peak, document.body.dataset.heard ?? 0);
  bars.push(peak);
  if (bars.length > BARS) bars.shift();
  draw();
}

function draw() {
  const canvas = find("wave"), context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = getComputedStyle(canvas).color;
  const width = canvas.width / BARS;
  bars.forEach((level, at) => {
    const height = Math.max(2, level * canvas.height);
    context.fillRect(at * width, (canvas.height - height) / 2, width - 1, height);
  });
}

/** Send the words that were written since the last piece, or all letters. Where the text before it was changed, it begins anew with the change. */
function write(last = false, all = last) {
  if (!begun || WATCHED) return;
  if (!connection.isOpen) { // a socket that comes back sends what was written meanwhile
    if (last) complain(AWAY);
    return;
  }
  const text = find("text").value;
  let same = 0;
  while (same < sent.length && same < text.length && sent[same] === text[same]) same += 1;
  if (same && /[\ud800-\udbff]/.test(text[same - 1])) same -= 1; // half of a letter
  if (same < sent.length) sent = text.slice(0, Math.max(same, text.lastIndexOf(" ", same) + 1));
  let end = text.length;
  if (!all) for (end = 0; FINISHES.test(text);) end = FINISHES.lastIndex;
  const piece = text.slice(sent.length, end);
  if (!piece && !last) return;
  const letters = [...piece], most = model.limits.text_letters;
  for (let at = 0; at < Math.max(1, letters.length); at += most) {
    const part = letters.slice(at, at + most).join(""), ends = last && at + most >= letters.length;
    unheard.set(connection.send("text", { text: part, ...(ends && { last: true }) }), { before: sent, ends });
    sent += part;
  }
  written ??= performance.now();
}

/** Send what was written while there was no socket, and before it what a dead one did not bring to the server. */
function writeAgain() {
  const [first, ...others] = unheard.values();
  unheard.clear();
  if (first) sent = first.before;
  writeOn([first, ...others].some((one) => one?.ends));
}

/** Send what is finished now, and the rest when nothing more is written for a moment. */
function writeOn(last = false) {
  write(last);
  clearTimeout(pause);
  pause = setTimeout(() => write(false, true), PAUSE_MS);
}

for (const kind of ["input", "compositionend"]) {
  find("text").addEventListener(kind, (event) => {
    if (event.isComposing) return; // a draft of an input method
    if (connection) writeOn();
    else if (!trying) attempted(start); // what waits in line sends the whole text when it gets in
  });
}
find("dock").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!trying) attempted(start);
});
find("say").onclick = () => write(true);
find("again").onclick = () => { sent = ""; write(true); };
find("hush").onclick = () => {
  const id = connection?.send("restart");
  if (!id) {
    complain(AWAY);
    return;
  }
  hushed = id;
  sound.drop();
  if (waiting.length) connection.send("ack", { chunk: waiting.pop().chunk });
  waiting = [];
};
let saving = false;
find("save").onclick = async () => {
  if (saving) return;
  saving = true;
  await attempted(saveSpeech);
  saving = false;
};

async function saveSpeech() {
  const input = find("text").value.trim();
  if (!input) throw new Error("Write something first");
  const words = find("words").value.trim();
  if (connection) { connection.close(); ended(); } // its row may be the only one
  say("Making the file", "wait");
  const speech = {
    model: model.id, input, response_format: "mp3", seed: Math.max(0, wholeSeed(find("seed").value)),
    ...(voice && { ref_audio: voice, ...(words && { ref_text: words }) }),
  };
  let blob;
  for (let tries = 0; !blob; tries += 1) {
    try {
      blob = await (await answered(base, "v1/audio/speech", key(), speech)).blob();
    } catch (error) {
      if (error.code !== "full" || tries === SAVE_TRIES) throw error;
      await new Promise((resolve) => { setTimeout(resolve, 1000); });
    }
  }
  say("Saved");
  document.body.dataset.saved = blob.size;
  saveFile(blob, "seko.mp3");
}
find("voice").addEventListener("change", ({ target }) => attempted(async () => {
  if (!target.files[0]) return;
  voice = await dataUrl(target.files[0], model.limits.voice_bytes);
  find("voice-name").textContent = target.files[0].name;
  if (connection) { connection.close(); ended(); await start(); }
}));
function come() {
  if (!WATCHED) return meet();
  say("Ready"); // a page is silent until somebody presses something
  block("Somebody shares what they hear.", { Listen: () => attempted(hear) });
}
find("key").addEventListener("change", () => attempted(come));
window.addEventListener("pagehide", () => { trying?.abort(); connection?.close(); });
attempted(come);
