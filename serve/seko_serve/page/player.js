// The worker: decodes media messages and paints each frame when it is due.
import { parseMedia } from "./protocol.js";

const DECODERS = { h264: "avc1.42E01F", vp8: "vp8" };
let canvas, context, decoder, clock, codec = "";
let frames = []; // decoded and not painted: { image, pts, chunk, last, number }
let waiting = []; // what the decoder was given: { pts, chunk, last, number }
let painted = 0, needsKey = true, rate = 16;
const MOST_LATE_US = 100_000; // behind this the clock stands still, so that no frame is skipped

self.onmessage = ({ data }) => {
  if (data.canvas) {
    canvas = data.canvas;
    context = canvas.getContext("2d", { alpha: false, desynchronized: true });
  } else if (data.ready) {
    ({ fps: rate, codec } = data.ready);
    canvas.width = data.ready.width;
    canvas.height = data.ready.height;
    restartDecoder();
  } else if (data.media) {
    take(parseMedia(data.media));
  } else if (data.stop) {
    clock = undefined;
  }
};

function restartDecoder() {
  decoder?.state !== "closed" && decoder?.close();
  waiting = [];
  needsKey = true;
  if (!(codec in DECODERS)) return;
  decoder = new VideoDecoder({
    output: (image) => ready(image, waiting.shift()),
    error: (error) => { self.postMessage({ failed: error.message }); },
  });
  decoder.configure({ codec: DECODERS[codec], optimizeForLatency: true });
}

async function take(media) {
  if (needsKey && !media.key) return;
  needsKey = false;
  self.postMessage({ serial: media.serial });
  const facts = { pts: media.pts, chunk: media.chunk, last: media.last, number: media.first };
  if (codec === "mjpeg") {
    ready(await createImageBitmap(new Blob([media.payload], { type: "image/jpeg" })), facts);
  } else if (codec === "rgb24") {
    const pixels = new Uint8ClampedArray(canvas.width * canvas.height * 4).fill(255);
    for (let at = 0, from = 0; from < media.payload.length; at += 4, from += 3) {
      pixels.set(media.payload.subarray(from, from + 3), at);
    }
    ready(await createImageBitmap(new ImageData(pixels, canvas.width, canvas.height)), facts);
  } else {
    waiting.push(facts);
    decoder.decode(new EncodedVideoChunk({
      type: media.key ? "key" : "delta", timestamp: media.pts, data: media.payload,
    }));
  }
}

function ready(image, facts) {
  frames.push({ image, ...facts });
  frames.sort((a, b) => a.number - b.number);
  if (frames.length === 1) schedule();
}

function schedule() {
  const due = frames[0];
  const now = performance.now() * 1000;
  clock ??= now - due.pts;
  if (now - clock - due.pts > MOST_LATE_US) clock = now - due.pts;
  setTimeout(paint, Math.max(0, (clock + due.pts - now) / 1000));
}

function paint() {
  const frame = frames.shift();
  if (!frame) return;
  context.drawImage(frame.image, 0, 0, canvas.width, canvas.height);
  frame.image.close();
  painted += 1;
  self.postMessage({
    painted, buffered: frames.length, chunk: frame.chunk, number: frame.number, shown: frame.last ? frame.chunk : undefined,
  });
  if (frames.length) schedule();
}
