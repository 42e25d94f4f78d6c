// The worker: decodes frames and paints each one when it is due, by the sound's clock where there is sound.
const DECODERS = { h264: "avc1.42E01F", vp8: "vp8" };
const MOST_LATE_US = 100_000; // behind this a clock of its own stands still, so that no frame is skipped
let canvas, context, decoder, codec = "", copying = false;
let frames = []; // decoded and not painted: { image, pts, chunk, last, number }
let waiting = []; // what the decoder was given: { pts, chunk, last, number }
let session = 0; // counts those that began
let painted = 0, newest = -1, needsKey = true, timer;
let zero; // the worker's time, in microseconds, at which frame 0 was due
let heard; // of the sound: { pts, at, running }

const now = () => (performance.timeOrigin + performance.now()) * 1000;

self.onmessage = ({ data }) => {
  if (data.canvas) {
    canvas = data.canvas;
    context = canvas.getContext("2d", { alpha: false, desynchronized: true });
  } else if (data.ready) {
    begin(data.ready, data.again);
  } else if (data.media) {
    take(data.media);
  } else if (data.stop) {
    zero = undefined;
  } else if ("clock" in data) {
    heard = data.clock;
    schedule();
  } else if ("copying" in data) {
    copying = data.copying;
  }
};

/** Begin a session; `again`: its socket is back, and the frames go on behind those that came. */
function begin(ready, again) {
  if (!again) {
    session += 1;
    for (const { image } of frames) image.close();
    [frames, waiting, newest, painted, zero, heard] = [[], [], -1, 0, undefined, undefined];
    [canvas.width, canvas.height] = [ready.width, ready.height];
  }
  if (again && ready.codec === codec && decoder?.state !== "closed") return;
  codec = ready.codec;
  if (decoder && decoder.state !== "closed") decoder.close();
  [decoder, waiting, needsKey] = [undefined, [], true];
  if (!(codec in DECODERS)) return;
  decoder = new VideoDecoder({
    output: (image) => decoded(image, waiting.shift()),
    error: (error) => { self.postMessage({ failed: error.message }); },
  });
  decoder.configure({ codec: DECODERS[codec], optimizeForLatency: true });
}

function take(media) {
  if (needsKey && !media.key) return;
  needsKey = false;
  const facts = { pts: media.pts, chunk: media.chunk, last: media.last, number: media.first };
  if (codec === "mjpeg") {
    drawn(new Blob([media.payload], { type: "image/jpeg" }), facts);
  } else if (codec === "rgb24") {
    const pixels = new Uint8ClampedArray(canvas.width * canvas.height * 4).fill(255);
    for (let at = 0, from = 0; from < media.payload.length; at += 4, from += 3) {
      pixels.set(media.payload.subarray(from, from + 3), at);
    }
    drawn(new ImageData(pixels, canvas.width, canvas.height), facts);
  } else {
    waiting.push(facts);
    decoder.decode(new EncodedVideoChunk({
      type: media.key ? "key" : "delta", timestamp: media.pts, data: media.payload,
    }));
  }
}

/** Make a frame of a picture, unless another session begins meanwhile. */
async function drawn(picture, facts) {
  const mine = session, image = await createImageBitmap(picture);
  if (mine === session) decoded(image, facts);
  else image.close();
}

function decoded(image, facts) {
  if (facts.number <= newest) { // a restarted server makes the chunks again that it had not saved
    image.close();
    if (facts.last) self.postMessage({ shown: facts.chunk });
    return;
  }
  frames.push({ image, ...facts });
  frames.sort((a, b) => a.number - b.number);
  if (frames.length === 1) {
    self.postMessage({ first: facts.pts });
    schedule();
  }
}

/** Return the microseconds until a time of the stream; infinite while its sound stands still. */
function until(pts) {
  const time = now();
  if (heard) {
    const played = heard.pts + (heard.running ? time - heard.at : 0);
    return heard.running || pts <= played ? Math.max(0, pts - played) : Infinity;
  }
  zero ??= time - pts;
  if (time - zero - pts > MOST_LATE_US) zero = time - pts;
  return Math.max(0, zero + pts - time);
}

function schedule() {
  clearTimeout(timer);
  if (!frames.length) return;
  const wait = until(frames[0].pts);
  if (wait < Infinity) timer = setTimeout(paint, wait / 1000);
}

async function paint() {
  const frame = frames.shift();
  if (!frame) return;
  context.drawImage(frame.image, 0, 0, canvas.width, canvas.height);
  frame.image.close();
  painted += 1;
  newest = frame.number;
  self.postMessage({
    painted, buffered: frames.length, chunk: frame.chunk, number: frame.number, shown: frame.last ? frame.chunk : undefined,
  });
  schedule();
  if (copying) {
    const copy = await createImageBitmap(canvas);
    self.postMessage({ copy }, [copy]);
  }
}
