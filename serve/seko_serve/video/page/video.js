// The page: what a person does, and what is told. A player decodes and paints; the connection talks to the server.
import { Changes, Way } from "./changes.js";
import { AWAY, Connection, Watch, admitted, answered, request, sentence } from "./connection.js";
import { base, block, complain, face, fail, find, key, say, servedModel, settle, unblock } from "./frame.js";
import { KeyPad } from "./keys.js";
import { PromptField, Timeline, recordedPrompts, wholeSeed } from "./prompts.js";
import { Recorder, save } from "./recorder.js";
import { WATCHED, share } from "./share.js";
import { Microphone, Sound, playable, sendFile } from "./sound.js";
import { SourcePlayer, playsSound, playsVideo } from "./source.js";
import { Stage } from "./stage.js";
import { Gamepads, Looking } from "./sticks.js";
import { dataUrl } from "./uploads.js";
import { Webcam } from "./webcam.js";
import { PictureWell } from "./wells.js";

const FIGURES_MS = 2000; // over which frames a second are counted; a video without a frame for so long is not live
const STILL_MS = 3500; // without a frame: what is only slow goes on meanwhile
const MEASURE_MS = 500;
const LEFT_MS = 700, LEFT_TRIES = 4; // within which a server frees the place of a page that was left
const RUNNING = ["pause", "restart", "record", "stop"]; // buttons of a session
const NOTHING = { takes: {}, controls: {}, limits: {}, viewer: {} }; // of a model of which one sees the video alone

const worker = new Worker(new URL("./player.js", import.meta.url), { type: "module" });
const offscreen = find("video").transferControlToOffscreen();
worker.postMessage({ canvas: offscreen }, [offscreen]);
const source = new SourcePlayer(find("source"), (told) => heed(told));
let player = worker, screen = find("video");

let model, connection, sound, microphone, recorder;
let spoke = false, sending = 0; // whether this session was sent a voice; files of sound that are being sent
let paused = false, hiddenPause = false, muted = false, begun = false;
let trying; // what gives up the try to open a session that goes on
let wells = [], wellsDrawn = ""; // and their descriptions
let picturesSent = ""; // with which the session began
let voice, voiceSent; // a file and its data URL: with which the next session begins, and with which this one did
const sent = new Map(); // by id: when a control was sent, its entry in the timeline, and the chunk that follows it
const times = []; // when the last frames were painted
let lastPainted; // when the last frame was painted
let broken; // why nothing is shown
let away = false; // whether the socket is lost

const stage = new Stage(
  () => !connection || paused || document.activeElement === find("prompt") && find("prompt").value.trim() !== shownPrompt(),
  (code) => pad.buttons.has(code),
);
const timeline = new Timeline(find("history"), (prompt) => choose(prompt, true), () => {
  const some = timeline.entries.some(({ chunk }) => chunk !== undefined);
  find("no-prompts").hidden = timeline.entries.length > 0;
  find("timeline-save").disabled = find("timeline-replay").disabled = !some;
});
const changes = new Changes(timeline, (entry, weight) => {
  if (!connection.isOpen) return "";
  const id = control("prompt", { text: entry.prompt, recache: entry.cut, ...(weight < 1 && { weight }) });
  Object.assign(sent.get(id), { entry, weight });
  return id;
});
const way = new Way(find("change"), find("amount"));
const field = new PromptField(find("prompt"), () => screen.focus());
const shownPrompt = () => timeline.entries.at(-1)?.prompt ?? "";

// -- what is told ---------------------------------------------------------------------------------------------
const startAgain = WATCHED ? { "Try again": () => attempted(watch) } : { "Start again": () => find("dock").requestSubmit() };
const [[AGAIN, beginsAgain]] = Object.entries(startAgain);
const afterEnd = { [AGAIN]: () => { giveUp(); beginsAgain(); } }; // of a session that still runs

function showRunning(now) {
  for (const id of RUNNING) find(id).hidden = !now;
  find("start").textContent = !now ? "Start" : "Change";
  find("start").hidden = now && !model.takes.prompt;
  way.show(now && model.takes.prompt);
  find("microphone").hidden = !now || !navigator.mediaDevices || sounding()?.speakers !== 1;
  find("webcam").hidden = !filmed() || !navigator.mediaDevices;
  find("strength-box").hidden = !filmed();
  find("pad").hidden = !now || !keyed();
  find("share").hidden = !now;
}

/** Say what to do before a session runs. */
function invite() {
  if (WATCHED) return;
  const lacking = wells.filter(({ required, url }) => required && !url);
  find("start").disabled = lacking.length > 0;
  if (connection || trying) return;
  if (lacking.length) {
    const named = lacking.map(({ label }) => `a ${label.toLowerCase()}`).join(" and ");
    block(`Choose ${named}, then press Start.`, { "Choose a picture": () => lacking[0].input.click() });
  } else if (filmed() && !webcam.running) {
    block("Turn your camera on, then press Start.", { "Camera on": () => find("webcam").click() });
  } else block(model.takes.prompt ? "Write what you want to see, then press Start." : "Press Start.");
}

function button(action, ...content) {
  const made = document.createElement("button");
  made.type = "button";
  made.append(...content);
  made.onclick = action;
  return made;
}

/** Put a prompt into the field, and into the video if one runs or `starts` says so. */
function choose(prompt, starts) {
  find("prompt").value = prompt;
  if (starts || connection) find("dock").requestSubmit();
}

/** Show what the artifact brings for the person who meets it, and begin with the first of each. */
async function showExamples({ help, prompts, pictures }) {
  find("help").textContent = find("about").textContent = help;
  find("help").hidden = find("about").hidden = !help;
  find("prompt").value ||= prompts[0] ?? "";
  const files = await Promise.all(pictures.map(async ({ url, caption }, number) => {
    const blob = await (await answered(base, url, key())).blob();
    return new File([blob], caption || `Picture ${number + 1}`, { type: blob.type });
  }));
  const tiles = await Promise.all((files.length > 1 ? files : []).map(async (file) => {
    const image = new Image();
    image.src = await dataUrl(file);
    image.alt = file.name;
    return button(() => attempted(() => take(file, wells[0])), image);
  }));
  const words = (prompts.length > 1 ? prompts : []).map((prompt) => {
    const text = document.createElement("span");
    text.textContent = prompt;
    return button(() => choose(prompt, false), text);
  });
  find("examples").replaceChildren(...tiles, ...words);
  find("examples").hidden = tiles.length + words.length === 0;
  if (wells[0]?.required && files.length && !wells[0].url) await take(files[0]);
}

/** Show what was measured: frames a second, and whether the video moves. Nothing else is called live. */
function measure() {
  const now = performance.now();
  while (times.length && times[0] < now - FIGURES_MS) times.shift();
  if (!connection || !begun) return;
  const since = times.length > 1 ? now - times[0] : 0;
  find("fps").textContent = since ? ((times.length - 1) * 1000 / since).toFixed(1) : "0.0";
  if (away) return;
  if (broken) {
    say(broken, "error");
    block(broken, afterEnd);
  } else if (filmed() && !webcam.running && !lastPainted) {
    say("Waits for your camera", "wait");
    const elsewhere = find("share").hidden ? {} : { "Send it from elsewhere": () => find("share").click() };
    block("Turn your camera on.", { "Camera on": () => find("webcam").click(), ...elsewhere });
  } else if (paused || times.length) {
    say(paused ? "Paused" : "Live", paused ? "" : "live");
    unblock();
  } else if (lastPainted && now - lastPainted < FIGURES_MS) { // it goes on after a pause, or on another socket
    say("Going on", "wait");
    unblock();
  } else {
    const still = lastPainted ? now - lastPainted : 0;
    say(still ? "The picture stands still" : "Making the first picture", "wait");
    if (!still) block("Making the first picture", {}, "wait");
    else if (still > STILL_MS) {
      block(`The picture stands still: nothing new for ${Math.floor(still / 1000)} s`,
        { "Connect again": () => connection?.reconnect() }, "wait");
    }
  }
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
const keyed = () => Object.entries(model?.controls ?? {}).find(([, { keys }]) => keys);

/** The name and description of the control that takes a video. */
const filmed = () => Object.entries(model?.controls ?? {}).find(([, { video }]) => video);

/** What the control says that takes sound. */
const sounding = () => Object.values(model?.controls ?? {}).find(({ sound }) => sound)?.sound;

/** Tell the control that takes keys what is held, pushed or moved. */
function steer(event) { if (connection) control("control", { name: keyed()[0], event }); }
const held = () => ({ name: keyed()[0], event: { held: [...pad.held] } });
function tellHeld() {
  if (!connection) return;
  find("help").hidden = true;
  control("control", held());
}

const seed = () => wholeSeed(find("seed").value);

/** The pictures that a session begins with. */
function pictures() {
  const fields = {};
  for (const well of wells) well.addTo(fields);
  return fields;
}

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
  if (prompt) field.remember(prompt);
}

/** Give up the try to open a session. */
function giveUp() {
  connection?.close();
  ended();
}

/** Show who comes what it does: begin with the artifact's own example, if a place is free. */
async function showMotion({ prompts, pictures }) {
  const prompt = find("prompt").value, still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (still || filmed() || !(prompts.length || pictures.length)) return;
  const untouched = () => !connection && !trying && !document.hidden && !find("start").disabled && find("prompt").value === prompt;
  if (untouched() && await placeFree() && untouched()) await startWith(prompt.trim());
}

/** Whether the server has a place: this page itself, loaded again, may still hold the one that it left. */
async function placeFree() {
  for (let tries = 1; ; tries += 1) {
    const { free } = await request(base, "ready", key()).catch(() => ({})); // a gateway's answer names no places
    if (free !== 0 || tries === LEFT_TRIES) return free > 0;
    await new Promise((resolve) => { setTimeout(resolve, LEFT_MS); });
  }
}

/** What this browser plays, the best first. */
async function played() {
  const codecs = await supported();
  return { codecs, audio: codecs[0] !== "fmp4" ? await playable() : playsSound() ? ["aac"] : [] };
}

/** Watch the session of another. */
async function watch() {
  block("One moment", {}, "wait");
  say("Opening", "wait");
  model = NOTHING;
  const hello = await played();
  connection = new Watch(base, WATCHED[1], WATCHED[2]);
  listen(connection);
  connection.open(hello);
}

async function enter(prompt, signal) {
  block("One moment", {}, "wait");
  const { codecs, audio } = await played();
  const hello = { codecs, audio: sounding() ? audio : [] };
  if (signal.aborted) return;
  const waits = (text) => {
    say(text, "wait");
    block(text, { "Stop waiting": giveUp }, "wait");
  };
  waits("Opening");
  await admitted(base, key(), async (place) => {
    const given = pictures(), spoken = voice; // as they are now: some may have been chosen in line
    const session = {
      model: model.id, seed: seed(), ...(model.takes.prompt && { prompt }), ...given,
      ...(spoken && { [sounding().field]: spoken.url }),
    };
    const trial = new Connection(base, key());
    listen(trial);
    connection = trial;
    try {
      await trial.open(session, hello, place);
      if (connection !== trial) return; // it was given up meanwhile
      picturesSent = JSON.stringify(given);
      voiceSent = spoken;
      timeline.begin(session.seed, prompt);
    } catch (error) {
      if (connection === trial) connection = undefined;
      throw error;
    }
  }, waits, signal);
}

function listen(to) {
  spoke = false;
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
      for (const [id, control] of sent) { // when they were followed is not known any more
        if (control.entry && control.entry !== changes.wish?.entry) control.at = undefined;
        else sent.delete(id);
      }
      changes.lost();
      const text = `${detail.reason ?? "The connection was lost"}. Trying again`;
      say(text, "error");
      block(text, { "Try now": () => to.hurry(), End: giveUp }, "wait");
    }
  });
}

function told(message) {
  if (message.type === "ready") {
    const again = begun;
    if (WATCHED) model = { ...NOTHING, width: message.width, height: message.height };
    if (!again) show(message.codec);
    player.postMessage({ ready: message, again });
    timeline.seconds = message.chunk_frames / message.fps;
    if (!again) {
      hear(message.audio);
      find("late").textContent = 0;
      if (keyed()) screen.focus();
    }
    begun = true;
    if (lastPainted) lastPainted = performance.now();
    showRunning(true);
    showPaused(false); // where it is paused, a message `state` follows
    away = false;
    broken = undefined;
    settle();
    measure();
    changes.resend();
    if (again && spoke && !microphone && !sending) connection.send("audio_end"); // the voice's end may have been lost
    if (keyed()) { // they may have changed meanwhile
      if (again || pad.held.size) connection.send("control", held());
      gamepads.tellAgain();
    }
    if (filmed()) tellStrength();
    attempted(speakChosen);
    if (!again || hiddenPause) heedSight(); // it was hidden while it waited, or while the socket was lost
  } else if (message.type === "received" || message.type === "applied") {
    const control = sent.get(message.id);
    changes.received(message.id);
    if (message.type === "received") return;
    if (control?.entry && control.chunk === undefined) timeline.place(control.entry, message.chunk, control.weight);
    if (control) control.chunk = message.chunk;
    if (control?.seed !== undefined) timeline.begin(control.seed, shownPrompt(), message.chunk);
    settle();
  } else if (message.type === "rejected" || message.type === "error") {
    changes.refused(message.id, sent.get(message.id)?.entry);
    sent.delete(message.id);
    complain(sentence(message.message));
  } else if (message.type === "chunk") {
    if (message.late_ms > 0) find("late").textContent = Number(find("late").textContent) + 1;
    changes.made(message.chunk);
  } else if (message.type === "state") {
    showPaused(message.paused);
    if (lastPainted) lastPainted = performance.now();
    measure();
    if (!paused) hiddenPause = false;
    heedSight(); // it was shown or hidden while the answer was under way
    if (paused) player.postMessage({ stop: true });
    if (paused) sound?.stop();
    else sound?.start();
  }
}

function showPaused(on) {
  paused = on;
  face(find("pause"), on ? "play" : "pause", on ? "Go on" : "Pause");
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
  forget();
  finishRecording();
  microphone?.stop();
  microphone = undefined;
  showMicrophone();
  sound?.close();
  if (player === source) source.close();
  sound = undefined;
  find("mute").hidden = true;
  showRunning(false);
  say(reason ?? "Ended", reason && "error");
  invite();
  if (WATCHED) block(reason ?? "The video has ended", startAgain);
  else if (reason && !find("start").disabled) block(reason, startAgain);
}

/** Forget a session: what was measured of it, what was sent and what waits. What it was asked for stays to be saved. */
function forget() {
  connection = undefined;
  begun = away = hiddenPause = false;
  broken = lastPainted = undefined;
  changes.forget();
  showPaused(false);
  sent.clear();
  times.length = 0;
  for (const id of ["fps", "buffered", "chunk", "reaction"]) find(id).textContent = "–";
}

worker.onmessage = ({ data }) => heed(data);

/** Heed what a player tells: a frame that was painted or copied, or a failure. */
function heed(data) {
  if (data.failed) broken = `This browser cannot decode the video: ${data.failed}`;
  if (data.first !== undefined && !paused) sound?.start();
  if (data.copy) recorder ? recorder.add(data.copy) : data.copy.close();
  if (!begun) return; // frames of a session that has ended
  if (data.shown !== undefined) connection.send("ack", { chunk: data.shown });
  if (data.painted === undefined) return;
  const now = lastPainted = performance.now();
  times.push(now);
  measure();
  find("buffered").textContent = data.buffered;
  find("chunk").textContent = data.chunk;
  document.body.dataset.painted = data.painted;
  document.body.dataset.frame = data.number;
  for (const [id, { at, chunk }] of sent) {
    if (chunk === undefined || chunk > data.chunk) continue;
    if (at !== undefined) find("reaction").textContent = `${Math.round(now - at)} ms`;
    sent.delete(id);
  }
}

// -- what a person does ---------------------------------------------------------------------------------------
async function reopen(prompt, later = []) {
  giveUp();
  changes.due = later;
  await startWith(prompt);
}

async function attempted(action) {
  try {
    await action();
  } catch (error) {
    if (begun || !connection && model && error.code === undefined && !trying) complain(error.message);
    else fail(error, model ? startAgain : { "Try again": () => attempted(come) });
  }
}

find("dock").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = model?.takes.prompt ? find("prompt").value.trim() : "";
  attempted(async () => {
    if (!model) await meet();
    if (find("start").disabled || trying) return;
    const letters = [...prompt].length, most = model.limits.prompt_letters;
    if (letters > most) throw new Error(`The prompt has ${letters} letters, and at most ${most} are taken`);
    changes.due = []; // of a timeline: now a person says what comes
    if (connection) find("help").hidden = true; // who changes it has read that
    if (!connection) await startWith(prompt);
    else if (begun && model.takes.prompt) {
      changes.ask(way.to(prompt, timeline.seconds));
      field.remember(prompt);
    }
    if (keyed()) screen.focus(); // keys steer again
  });
});

/** Begin the stream again, with the seed that is written. */
function beginAgain() {
  if (connection.isOpen) changes.finish();
  const id = control("restart", { seed: seed() });
  if (id) sent.get(id).seed = seed();
}

find("pause").onclick = () => control(paused ? "play" : "pause");
find("restart").onclick = () => attempted(async () => {
  if (JSON.stringify(pictures()) !== picturesSent) await reopen(find("prompt").value.trim());
  else beginAgain();
});
find("another").onclick = () => {
  find("seed").value = Math.floor(Math.random() * 1_000_000);
  if (connection) beginAgain();
};
find("stop").onclick = giveUp;
find("mute").onclick = () => {
  muted = !muted;
  sound?.mute(muted);
  face(find("mute"), muted ? "mute" : "sound", muted ? "Sound is off" : "Sound");
  find("mute").setAttribute("aria-pressed", !muted);
};
find("record").onclick = () => attempted(async () => {
  if (recorder) { await finishRecording(); return; }
  const { clientWidth: width, clientHeight: height } = screen;
  const heard = sound && await sound.stream();
  find("recording").textContent = "0:00";
  recorder = new Recorder(model.width ?? width, model.height ?? height, heard, (time) => { find("recording").textContent = time; });
  player.postMessage({ copying: true });
  face(find("record"), "save", "Save the recording");
  find("record").setAttribute("aria-pressed", true);
  find("recording").hidden = false;
});

async function finishRecording() {
  if (!recorder) return;
  const done = recorder;
  recorder = undefined;
  player.postMessage({ copying: false });
  face(find("record"), "record", "Record");
  find("record").setAttribute("aria-pressed", false);
  find("recording").hidden = true;
  const blob = await done.stop();
  if (!blob) { complain("Nothing was shown while it recorded, so there is no file"); return; }
  document.body.dataset.saved = blob.size;
  save(blob);
}

/** Take a file that was chosen or dropped, a picture in the first well that is empty if no other is named. */
async function take(file, well = wells.find(({ url }) => !url) ?? wells[0]) {
  const kind = file.type.split("/")[0], taken = { image: well, audio: sounding() };
  if (!taken[kind]) throw new Error(`${file.name} is no ${taken.audio ? "picture or sound" : taken.image ? "picture" : "file that this model takes"}`);
  if (kind === "image") {
    await well.take(file);
    showGiven();
    if (connection) {
      well.name.textContent += ": press Start over to use it";
      stage.open("files");
    } else invite();
  } else {
    if (begun) {
      const mine = connection; // its end is the voice's, too
      if (!mine.isOpen) throw new Error(AWAY);
      spoke = true;
      sending += 1;
      try {
        const seconds = await sendFile(file, model.limits, (samples, last) => mine.sendVoice(samples, last));
        find("voice-name").textContent = `${file.name}, ${seconds.toFixed(0)} s`;
      } finally {
        sending -= 1;
      }
    } else {
      voice = { file, url: await dataUrl(file, model.limits.voice_bytes) };
      find("voice-name").textContent = file.name;
      await speakChosen();
    }
  }
}

/** Let a session hear the voice that was chosen while it opened. */
async function speakChosen() {
  if (!begun || voice === voiceSent) return;
  voiceSent = voice;
  await take(voice.file);
}
find("voice").addEventListener("change", ({ target }) => {
  const [file] = target.files;
  target.value = ""; // the same file may be chosen again, also after an error
  if (file) attempted(() => take(file));
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") attempted(async () => { for (const file of event.dataTransfer.files) await take(file); });
  });
}
async function stopSpeaking() {
  await microphone?.stop();
  microphone = undefined;
  connection?.send("audio_end");
  showMicrophone();
}
find("microphone").onclick = () => attempted(async () => {
  if (microphone) {
    await stopSpeaking();
  } else {
    const mine = microphone = new Microphone();
    spoke = true;
    try {
      await mine.start((samples) => { if (!paused) connection?.sendVoice(samples); }, () => attempted(async () => {
        await stopSpeaking();
        complain("The microphone is gone");
      }));
    } catch (error) {
      if (microphone === mine) microphone = undefined;
      throw new Error(`The microphone cannot be used: ${error.message}`);
    }
  }
  showMicrophone();
});
function showMicrophone() {
  find("microphone").setAttribute("aria-pressed", Boolean(microphone));
  face(find("microphone"), "microphone", microphone ? "Stop speaking" : "Speak");
}

const webcam = new Webcam(find("camera"), (jpeg, dropped, seenAt) => {
  // One frame at a time is followed to the picture that it becomes.
  const followed = sent.size ? undefined : (id) => sent.set(id, { at: seenAt });
  const taken = Boolean(connection) && begun && !paused && connection.sendFrame(jpeg, dropped, followed);
  find("frames-sent").textContent = `${webcam.sent + taken}, ${webcam.dropped + !taken}`;
  return taken;
}, () => {
  showWebcam();
  complain("The camera is gone");
});
find("webcam").onclick = () => attempted(async () => {
  if (webcam.asked) webcam.stop();
  else {
    try {
      await webcam.start(filmed()[1].video, model.limits.frame_bytes);
    } catch (error) {
      webcam.stop();
      throw new Error(`The camera cannot be used: ${error.message}`);
    }
  }
  showWebcam();
});
function showWebcam() {
  face(find("webcam"), "camera", webcam.running ? "Camera off" : "Camera on");
  find("webcam").setAttribute("aria-pressed", webcam.running);
  find("camera-box").hidden = find("camera-figures").hidden = !webcam.running;
  if (connection) measure();
  else invite();
}
function tellStrength() {
  if (connection && begun) control("control", { name: filmed()[0], event: { strength: Number(find("strength").value) } });
}
find("strength").addEventListener("input", tellStrength);
let strengthChosen = false;
function showStrength({ minimum, maximum, value }) {
  if (strengthChosen) return; // it stays, when the model is met again
  strengthChosen = true;
  Object.assign(find("strength"), { min: minimum, max: maximum, value });
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.repeat || find("prompt").hidden || ![document.body, screen].includes(event.target)) return;
  event.preventDefault();
  find("prompt").focus();
});

const pad = new KeyPad(find("pad"), tellHeld);
const gamepads = new Gamepads(pad, (axes) => steer({ axes }));
const looking = ["video", "source"].map((id) => new Looking(find(id), (moved) => steer({ moved })));
function heedSight() { // nobody sees it: the row need not run
  if (!begun || sound || recorder || WATCHED) return;
  if (document.hidden && !paused) hiddenPause = true;
  if (!hiddenPause || !connection.isOpen) return; // `ready` of the next socket calls this again
  if (!document.hidden) control("play"); // may be lost with its socket: the pause is the page's until `state` ends it
  else if (!paused) control("pause");
}
document.addEventListener("visibilitychange", heedSight);
window.addEventListener("pagehide", () => { trying?.abort(); connection?.close(); });

const shared = share(stage, () => connection.id);
find("share").onclick = () => {
  find("whip").hidden = !filmed();
  find("whip-address").value = new URL(`v1/sessions/${connection.id}/whip`, location.href);
  attempted(shared);
};

find("timeline-save").onclick = () => save(new Blob([timeline.text()], { type: "application/jsonl" }), "seko.jsonl");
find("timeline-replay").onclick = () => attempted(() => playAgain(recordedPrompts(timeline.text(), "the timeline")));
find("timeline-file").addEventListener("change", ({ target }) => attempted(async () => {
  const [file] = target.files;
  target.value = ""; // the same file may be chosen again, also after an error
  if (file) await playAgain(recordedPrompts(await file.text(), file.name));
}));

/** Begin again with the seed and the first prompt of a timeline; the others come when they are due. */
async function playAgain({ seed, prompts: [first, ...later] }) {
  find("seed").value = seed;
  find("prompt").value = first.prompt;
  await reopen(first.prompt, later);
}

/** Draw the wells of pictures. */
function showWells() {
  const described = Object.values(model.controls).flatMap((control) => control.pictures ?? [])
    .sort((a, b) => ("place" in a) - ("place" in b)); // masks behind the pictures that they belong to
  if (JSON.stringify(described) === wellsDrawn) return; // what was chosen stays
  wellsDrawn = JSON.stringify(described);
  for (const { section } of wells) section.remove();
  wells = described.map((one) => {
    const well = new PictureWell(one, (file) => attempted(() => take(file, well)));
    find("voice-box").before(well.section);
    return well;
  });
  showGiven();
}

/** Show on its button what the next session begins with. */
function showGiven() {
  const url = wells.find((well) => well.url)?.url;
  find("given").hidden = !wells.length && !sounding();
  find("given").querySelector("img")?.remove();
  if (url) find("given").append(Object.assign(new Image(), { src: url, alt: "" }));
  find("given").querySelector("svg").style.display = url ? "none" : "";
}

/** Ask the server what its model takes, and show the page accordingly. */
async function meet() {
  model = await servedModel();
  find("access").hidden = true;
  find("model").textContent = `${model.id}, ${model.width} × ${model.height}, ${model.fps} frames a second`;
  find("prompt").hidden = !model.takes.prompt;
  find("voice-box").hidden = !sounding();
  showWells();
  find("prompt").required = model.takes.prompt && !wells.some(({ required }) => required); // a portrait needs no words
  if (keyed()) find("reaction-name").textContent = "Key to picture";
  if (filmed()) {
    find("reaction-name").textContent = "Camera to picture";
    showStrength(filmed()[1].strength);
  }
  pad.show(keyed()?.[1] ?? {});
  find("keys-help").textContent = pad.help;
  find("keys-help").hidden = !pad.help;
  gamepads.show(keyed()?.[1].gamepad);
  for (const one of looking) one.show(keyed()?.[1].mouse);
  showRunning(Boolean(connection));
  if (!connection) invite();
  await showExamples(model.viewer);
  if (!connection) say("Ready");
}

async function come() {
  if (WATCHED) return watch();
  await meet();
  await showMotion(model.viewer);
}
find("key").addEventListener("change", () => attempted(come));
attempted(come);
