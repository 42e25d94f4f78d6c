// The page: what a person does, and what is told. A player decodes and paints; the connection talks to the server.
import { AWAY, Connection, admitted, answered, request, sentence } from "./connection.js";
import { base, complain, fail, find, key, say, servedModel, settle } from "./frame.js";
import { KeyPad } from "./keys.js";
import { Recorder, save } from "./recorder.js";
import { Microphone, Sound, playable, sendFile } from "./sound.js";
import { SourcePlayer, playsSound, playsVideo } from "./source.js";
import { Gamepads, Looking } from "./sticks.js";
import { dataUrl } from "./uploads.js";
import { PictureWell } from "./wells.js";

const FIGURES_MS = 2000; // over which frames a second are counted; a video without a frame for so long is not live
const MEASURE_MS = 500;
const IDLE_MS = 3000;
const BUTTONS = ["pause", "restart", "record", "full", "measures", "stop"];

const worker = new Worker(new URL("./player.js", import.meta.url), { type: "module" });
const offscreen = find("video").transferControlToOffscreen();
worker.postMessage({ canvas: offscreen }, [offscreen]);
const source = new SourcePlayer(find("source"), (told) => heed(told));
let player = worker, screen = find("video");

let model, connection, sound, microphone, recorder;
let paused = false, hiddenPause = false, muted = false, begun = false;
let trying; // what gives up the try to open a session that goes on
let wells = [], wellsDrawn = ""; // and their descriptions
let picturesSent = ""; // with which the session began
let voice; // a data URL, with which the next session begins
const sent = new Map(); // by id: when a control was sent, its line in the history, and the chunk that follows it
const times = []; // when the last frames were painted
let broken; // why nothing is shown
let away = false; // whether the socket is lost
let wish; // the last prompt of which the server has not said that it has it: { prompt, recache, line, id }

// -- what is told ---------------------------------------------------------------------------------------------
function hint(text) {
  find("hint-text").textContent = text;
  find("hint").hidden = !text;
}

function showRunning(now) {
  for (const id of BUTTONS) find(id).disabled = !now;
  find("start").textContent = !now ? "Start" : "Change";
  find("start").hidden = now && !model.takes.prompt;
  find("pad").hidden = !keyed();
}

function invite() {
  const lacking = wells.filter(({ required, url }) => required && !url).map(({ label }) => `a ${label.toLowerCase()}`);
  hint(lacking.length ? `Choose ${lacking.join(" and ")}, then press Start.`
    : model.takes.prompt ? "Write what you want to see, then press Start." : "Press Start.");
  find("start").disabled = lacking.length > 0;
}

function button(action, ...content) {
  const made = document.createElement("button");
  made.type = "button";
  made.append(...content);
  made.onclick = action;
  return made;
}

/** A sentence to press: it goes into the field, and to the video if one runs or `starts` says so. */
function sentenceButton(prompt, starts) {
  return button(() => {
    find("prompt").value = prompt;
    if (starts || connection) find("controls").requestSubmit();
  }, prompt);
}

/** Show what the artifact brings for the person who meets it, and begin with the first of each. */
async function showExamples({ help, prompts, pictures }) {
  find("help").textContent = help;
  find("help").hidden = !help;
  find("prompt").value ||= prompts[0] ?? "";
  find("prompts").replaceChildren(...(prompts.length > 1 ? prompts : []).map((prompt) => sentenceButton(prompt, false)));
  find("prompts").hidden = prompts.length < 2;
  const files = await Promise.all(pictures.map(async ({ url, caption }, number) => {
    const blob = await (await answered(base, url, key())).blob();
    return new File([blob], caption || `Picture ${number + 1}`, { type: blob.type });
  }));
  find("pictures").replaceChildren(...await Promise.all((files.length > 1 ? files : []).map(async (file) => {
    const image = new Image();
    image.src = await dataUrl(file);
    image.alt = file.name;
    return button(() => attempted(() => take(file, wells[0])), image);
  })));
  find("pictures").hidden = files.length < 2;
  if (wells[0]?.required && files.length && !wells[0].url) await take(files[0]);
}

function remember(prompt) {
  const line = document.createElement("li");
  line.append(sentenceButton(prompt, true));
  find("history").prepend(line);
  find("history-box").hidden = false;
  return line;
}

/** Show what was measured: frames a second, and whether the video moves. Nothing else is called live. */
function measure() {
  const now = performance.now();
  while (times.length && times[0] < now - FIGURES_MS) times.shift();
  if (!connection || !begun) return;
  const since = times.length > 1 ? now - times[0] : 0;
  find("fps").textContent = since ? ((times.length - 1) * 1000 / since).toFixed(1) : "0.0";
  if (away) return;
  if (paused) say("Paused");
  else if (times.length) say("Live", "live");
  else say(broken ?? "Waiting for the next picture", broken && "error");
}
setInterval(measure, MEASURE_MS);

// -- the session ----------------------------------------------------------------------------------------------
async function supported() {
  const found = [];
  if ("VideoDecoder" in window) {
    for (const [name, codec] of [["h264", "avc1.42E01F"], ["vp8", "vp8"]]) {
      try {
        if ((await VideoDecoder.isConfigSupported({ codec, optimizeForLatency: true })).supported) found.push(name);
      } catch { /* an unknown codec */ }
    }
  }
  return [...found, ...(playsVideo() ? ["fmp4"] : []), "mjpeg"]; // pages that are not secure have no VideoDecoder
}

function control(type, fields) {
  const id = connection?.send(type, fields);
  if (connection && !id && type !== "control") complain(AWAY); // held keys are told when it is back
  if (id && type !== "pause" && type !== "play") sent.set(id, { at: performance.now() });
  return id;
}

/** The name and description of the control that takes keys. */
const keyed = () => Object.entries(model.controls).find(([, { keys }]) => keys);

/** What the control says that takes sound. */
const sounding = () => Object.values(model.controls).find(({ sound }) => sound)?.sound;

/** Tell the control that takes keys what is held, pushed or moved. */
function steer(event) { if (connection) control("control", { name: keyed()[0], event }); }
function tellHeld() { steer({ held: [...pad.held] }); }

const seed = () => Math.trunc(Number(find("seed").value) || 0);

/** The pictures that a session begins with. */
const pictures = () => Object.assign({}, ...wells.map((well) => well.fields()));

/** Open a session; where all places are taken, try again when the server says, until the person gives up. */
async function start(prompt) {
  const mine = trying = new AbortController();
  try {
    await enter(prompt, mine.signal);
  } finally {
    if (trying === mine) trying = undefined;
    if (!mine.signal.aborted && !connection) invite();
  }
}

async function startWith(prompt) {
  await start(prompt);
  if (prompt && connection) remember(prompt);
}

/** Show who comes what it does: begin with the artifact's own example, if a place is free. */
async function showMotion({ prompts, pictures }) {
  const still = document.hidden || matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (connection || trying || still || find("start").disabled || !(prompts.length || pictures.length)) return;
  const { free } = await request(base, "ready", key()).catch(() => ({ free: 0 })); // a gateway's answer names no places
  if (free > 0 && !connection && !trying) await startWith(find("prompt").value.trim());
}

async function enter(prompt, signal) {
  hint("One moment");
  const codecs = await supported();
  const audio = codecs[0] !== "fmp4" ? await playable() : playsSound() ? ["aac"] : [];
  const hello = { codecs, audio: sounding() ? audio : [] };
  const session = {
    model: model.id, seed: seed(), ...(model.takes.prompt && { prompt }), ...pictures(),
    ...(voice && { [sounding().field]: voice }),
  };
  if (signal.aborted) return;
  say("Opening");
  find("stop").disabled = false;
  await admitted(base, key(), async (place) => {
    const trial = new Connection(base, key());
    listen(trial);
    connection = trial;
    try {
      await trial.open(session, hello, place);
      picturesSent = JSON.stringify(pictures());
    } catch (error) {
      if (connection === trial) connection = undefined;
      throw error;
    }
  }, say, signal);
}

function listen(to) {
  to.addEventListener("media", ({ detail: { media, data } }) => {
    if (to !== connection) return;
    if (media.sound) sound?.take(media);
    else player.postMessage({ media }, [data]);
  });
  to.addEventListener("told", ({ detail }) => { if (to === connection) told(detail); });
  to.addEventListener("lost", ({ detail }) => {
    if (to !== connection) return;
    if (detail.ended) ended(detail.reason);
    else {
      away = true;
      say("The connection was lost. Trying again", "error");
    }
  });
}

function told(message) {
  if (message.type === "ready") {
    const again = begun;
    if (!again) show(message.codec);
    player.postMessage({ ready: message, again });
    screen.parentElement.style.setProperty("--aspect", `${message.width} / ${message.height}`);
    if (!again) {
      hear(message.audio);
      find("late").textContent = 0;
      if (keyed()) screen.focus();
    }
    begun = true;
    hint("");
    showRunning(true);
    showPaused(false); // where it is paused, a message `state` follows
    away = false;
    broken = undefined;
    settle();
    measure();
    if (wish) sendWish();
    if (again && keyed()) tellHeld(); // they may have changed meanwhile
  } else if (message.type === "received" || message.type === "applied") {
    const control = sent.get(message.id);
    if (message.id === wish?.id) granted();
    if (message.type === "received") return;
    if (control) control.chunk = message.chunk;
    settle();
  } else if (message.type === "rejected" || message.type === "error") {
    sent.get(message.id)?.line?.remove(); // it is not what the video shows
    sent.delete(message.id);
    if (message.id && message.id === wish?.id) wish = undefined;
    complain(sentence(message.message));
  } else if (message.type === "chunk" && message.late_ms > 0) {
    find("late").textContent = Number(find("late").textContent) + 1;
  } else if (message.type === "state") {
    showPaused(message.paused);
    measure();
    if (paused && hiddenPause && !document.hidden) goOn();
    if (paused) player.postMessage({ stop: true });
    if (paused) sound?.stop();
    else sound?.start();
  }
}

/** Send the prompt that is wished, again where the server did not say that it has it. */
function sendWish() {
  wish.id = control("prompt", { text: wish.prompt, recache: wish.recache });
  sent.get(wish.id).line = wish.line;
}

function granted() {
  wish.line.classList.remove("waiting");
  wish = undefined;
}

/** Go on after a pause of the page's own. Where the socket is lost, the message `state` of the next one calls this again. */
function goOn() {
  if (control("play")) hiddenPause = false;
}

function showPaused(on) {
  paused = on;
  find("pause").textContent = on ? "Go on" : "Pause";
  find("pause").setAttribute("aria-pressed", on);
}

/** Choose the player of a codec, and the element on which it paints. */
function show(codec) {
  [player, screen] = codec === "fmp4" ? [source, find("source")] : [worker, find("video")];
  find("source").hidden = player !== source;
  find("video").hidden = player === source;
}

function hear(facts) {
  if (sound !== source) sound?.close();
  sound = facts && player === source ? source : facts ? new Sound(facts, (clock, peak) => {
    worker.postMessage({ clock });
    document.body.dataset.heard = Math.max(peak, document.body.dataset.heard ?? 0);
  }) : undefined;
  document.body.dataset.sound = facts?.codec ?? "";
  sound?.mute(muted);
  find("mute").hidden = !sound;
  if (sounding() && !facts) find("voice-name").textContent = "Sound needs a page over https, or on localhost.";
}

function ended(reason) {
  trying?.abort();
  trying = undefined;
  say(reason ?? "Ended", reason && "error");
  forget();
  finishRecording();
  microphone?.stop();
  microphone = undefined;
  find("microphone").setAttribute("aria-pressed", false);
  sound?.close();
  if (player === source) source.close();
  sound = undefined;
  showRunning(false);
  invite();
}

/** Forget a session: what was measured of it, what was sent and what waits. */
function forget() {
  connection = undefined;
  begun = away = false;
  broken = undefined;
  showPaused(false);
  sent.clear();
  times.length = 0;
  for (const id of ["fps", "buffered", "chunk", "reaction"]) find(id).textContent = "–";
  wish?.line.remove();
  wish = undefined;
}

worker.onmessage = ({ data }) => heed(data);

/** Heed what a player tells: a frame that was painted or copied, or a failure. */
function heed(data) {
  if (data.failed) broken = `This browser cannot decode the video: ${data.failed}`;
  if (data.first !== undefined && !paused) sound?.start();
  if (data.copy) recorder ? recorder.add(data.copy) : data.copy.close();
  if (data.shown !== undefined) connection?.send("ack", { chunk: data.shown });
  if (data.painted === undefined) return;
  if (!connection) return; // frames of a session that has ended
  const now = performance.now();
  times.push(now);
  measure();
  find("buffered").textContent = data.buffered;
  find("chunk").textContent = data.chunk;
  document.body.dataset.painted = data.painted;
  document.body.dataset.frame = data.number;
  for (const [id, { at, chunk }] of sent) {
    if (chunk === undefined || chunk > data.chunk) continue;
    find("reaction").textContent = `${Math.round(now - at)} ms`;
    sent.delete(id);
  }
}

// -- what a person does ---------------------------------------------------------------------------------------
async function reopen(prompt) {
  connection?.close();
  forget();
  await start(prompt);
}

async function attempted(action) {
  try {
    await action();
  } catch (error) {
    find("stop").disabled = !connection;
    fail(error, begun);
  }
}

find("controls").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = model?.takes.prompt ? find("prompt").value.trim() : "";
  attempted(async () => {
    if (!model) await meet();
    if (find("start").disabled || trying) return;
    const letters = [...prompt].length, most = model.limits.prompt_letters;
    if (letters > most) throw new Error(`The sentence has ${letters} letters, and at most ${most} are taken`);
    if (!connection) {
      await startWith(prompt);
      return;
    }
    if (wish?.line.classList.contains("waiting")) wish.line.remove(); // of those that wait only the last one is seen
    wish = { prompt, recache: find("recache").checked, line: remember(prompt) };
    if (connection.isOpen) sendWish();
    else wish.line.classList.add("waiting");
  });
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); find("controls").requestSubmit(); }
  if (event.key === "Escape") screen.focus();
});
find("pause").onclick = () => control(paused ? "play" : "pause");
find("restart").onclick = () => attempted(async () => {
  if (JSON.stringify(pictures()) !== picturesSent) await reopen(find("prompt").value.trim());
  else control("restart", { seed: seed() });
});
find("another").onclick = () => {
  find("seed").value = Math.floor(Math.random() * 1_000_000);
  if (connection) control("restart", { seed: seed() });
};
find("stop").onclick = () => { connection?.close(); ended(); };
find("mute").onclick = () => {
  muted = !muted;
  sound?.mute(muted);
  find("mute").textContent = muted ? "Sound on" : "Mute";
  find("mute").setAttribute("aria-pressed", muted);
};
find("full").onclick = () => {
  if (document.fullscreenElement) document.exitFullscreen();
  else find("stage").requestFullscreen();
};
find("measures").onclick = () => {
  find("figures").hidden = !find("figures").hidden;
  find("measures").setAttribute("aria-pressed", !find("figures").hidden);
};
document.addEventListener("keydown", ({ code }) => { if (code === "F2") find("measures").click(); });
let idle;
for (const what of ["pointermove", "pointerdown", "keydown", "fullscreenchange"]) { // in full screen controls fade
  document.addEventListener(what, () => {
    clearTimeout(idle);
    find("stage").classList.remove("idle");
    idle = setTimeout(() => find("stage").classList.add("idle"), IDLE_MS);
  });
}
find("record").onclick = () => attempted(async () => {
  if (recorder) { await finishRecording(); return; }
  const { clientWidth: width, clientHeight: height } = screen;
  recorder = new Recorder(model.width ?? width, model.height ?? height, sound && await sound.stream());
  player.postMessage({ copying: true });
  find("record").textContent = "Save";
  find("record").setAttribute("aria-pressed", true);
  find("recording").hidden = false;
});

async function finishRecording() {
  if (!recorder) return;
  const done = recorder;
  recorder = undefined;
  player.postMessage({ copying: false });
  find("record").textContent = "Record";
  find("record").setAttribute("aria-pressed", false);
  find("recording").hidden = true;
  const blob = await done.stop();
  document.body.dataset.saved = blob.size;
  save(blob);
}

/** Take a file that was chosen or dropped, a picture in the first well that is empty if no other is named. */
async function take(file, well = wells.find(({ url }) => !url) ?? wells[0]) {
  const kind = file.type.split("/")[0], taken = { image: well, audio: sounding() };
  if (!taken[kind]) throw new Error(`${file.name} is no ${taken.audio ? "picture or sound" : taken.image ? "picture" : "file that this model takes"}`);
  if (kind === "image") {
    await well.take(file);
    if (connection) well.name.textContent += ": press Start over to use it";
    else invite();
  } else {
    if (connection) {
      const seconds = await sendFile(file, model.limits, (samples, last) => connection?.sendVoice(samples, last));
      find("voice-name").textContent = `${file.name}, ${seconds.toFixed(0)} s`;
    } else {
      voice = await dataUrl(file, model.limits.voice_bytes);
      find("voice-name").textContent = file.name;
    }
  }
}
find("voice").addEventListener("change", ({ target }) => {
  attempted(async () => { if (target.files[0]) await take(target.files[0]); target.value = ""; });
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") attempted(async () => { for (const file of event.dataTransfer.files) await take(file); });
  });
}
find("microphone").onclick = () => attempted(async () => {
  if (microphone) {
    await microphone.stop();
    microphone = undefined;
    connection?.send("audio_end");
  } else {
    if (!connection) throw new Error("Press Start, then speak");
    microphone = new Microphone();
    try {
      await microphone.start((samples) => { if (!paused) connection?.sendVoice(samples); });
    } catch (error) {
      microphone = undefined;
      throw new Error(`The microphone cannot be used: ${error.message}`);
    }
  }
  find("microphone").setAttribute("aria-pressed", Boolean(microphone));
  find("microphone").textContent = microphone ? "Stop speaking" : "Speak";
});

const pad = new KeyPad(find("pad"), tellHeld);
const gamepads = new Gamepads(pad, (axes) => steer({ axes }));
const looking = ["video", "source"].map((id) => new Looking(find(id), (moved) => steer({ moved })));
document.addEventListener("visibilitychange", () => { // nobody sees it: the row need not run
  if (!connection || sound || recorder) return;
  if (document.hidden && !paused) { hiddenPause = true; control("pause"); }
  if (!document.hidden && hiddenPause) goOn();
});
window.addEventListener("pagehide", () => { trying?.abort(); connection?.close(); });

/** Draw the wells of pictures: those that a session needs before the sentence, the others after it. */
function showWells() {
  const described = Object.values(model.controls).flatMap((control) => control.pictures ?? []);
  if (JSON.stringify(described) === wellsDrawn) return; // what was chosen stays
  wellsDrawn = JSON.stringify(described);
  for (const { section } of wells) section.replaceWith(find("pictures"));
  wells = described.map((one) => {
    const well = new PictureWell(one, (file) => attempted(() => take(file, well)));
    find(one.required ? "prompt-box" : "start").before(well.section);
    return well;
  });
  wells[0]?.section.append(find("pictures"));
}

/** Ask the server what its model takes, and show the page accordingly. */
async function meet() {
  try {
    model = await servedModel();
  } catch (error) {
    const help = error.code !== "unauthorized" ? "Reload the page to try again."
      : `Write ${key() ? "another one" : "it"} under API key.`;
    if (!connection) hint(`${error.message}. ${help}`);
    throw error;
  }
  find("model").textContent = `${model.id}, ${model.width} × ${model.height}, ${model.fps} frames a second`;
  find("video").parentElement.style.setProperty("--aspect", `${model.width} / ${model.height}`);
  find("prompt-box").hidden = !model.takes.prompt;
  showWells();
  find("prompt").required = model.takes.prompt && !wells.some(({ required }) => required); // a portrait needs no words
  find("voice-box").hidden = !sounding();
  if (keyed()) find("reaction-name").textContent = "Key to picture";
  pad.show(keyed()?.[1] ?? {});
  gamepads.show(keyed()?.[1].gamepad);
  for (const one of looking) one.show(keyed()?.[1].mouse);
  find("microphone").hidden = !navigator.mediaDevices || sounding()?.speakers !== 1;
  showRunning(Boolean(connection));
  invite();
  await showExamples(model.viewer);
  say("Ready");
}
find("key").addEventListener("change", () => attempted(meet));
attempted(async () => {
  await meet();
  await showMotion(model.viewer);
});
