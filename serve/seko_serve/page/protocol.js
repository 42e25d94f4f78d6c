// The socket's binary messages: a header of 32 bytes, little endian, then the payload. See docs/clients.md.
export const VERSION = 1;
export const HEADER_BYTES = 32;
export const CODECS = { 1: "h264", 2: "vp8", 3: "rgb24", 4: "mjpeg", 5: "fmp4", 16: "pcm", 17: "aac", 18: "opus" };
const PCM = 16, JPEG = 4, LAST = 4;

/** Parse one binary message; throws a RangeError if it is none of this version. */
export function parseMedia(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < HEADER_BYTES || view.getUint8(0) !== VERSION) {
    throw new RangeError("not a media message of this version");
  }
  const flags = view.getUint8(2);
  return {
    codec: CODECS[view.getUint8(1)],
    sound: view.getUint8(1) >= PCM,
    key: Boolean(flags & 1),
    discontinuity: Boolean(flags & 2),
    last: Boolean(flags & 4),
    serial: view.getUint32(4, true),
    chunk: view.getUint32(8, true),
    first: view.getUint32(12, true),
    pts: Number(view.getBigUint64(16, true)),
    count: view.getUint32(24, true),
    payload: new Uint8Array(buffer, HEADER_BYTES),
  };
}

/** A message of a client with room for a payload, and a view of it. */
function packed(codec, serial, count, bytes) {
  const buffer = new ArrayBuffer(HEADER_BYTES + bytes);
  const view = new DataView(buffer);
  view.setUint8(0, VERSION);
  view.setUint8(1, codec);
  view.setUint32(4, serial, true);
  view.setUint32(24, count, true);
  view.setUint32(28, bytes, true);
  return { buffer, view };
}

/** Pack a frame of an input video, a JPEG; `dropped` frames were left out before it. One of serial 0 gets no receipts. */
export function packFrame(serial, jpeg, dropped) {
  const { buffer, view } = packed(JPEG, serial, 1, jpeg.byteLength);
  view.setUint32(12, dropped, true);
  new Uint8Array(buffer, HEADER_BYTES).set(new Uint8Array(jpeg));
  return buffer;
}

/** Pack a piece of a voice: an Int16Array at 16 kHz. Its receipts name the serial. */
export function packVoice(serial, samples, last = false) {
  const { buffer, view } = packed(PCM, serial, samples.length, 2 * samples.length);
  view.setUint8(2, last ? LAST : 0);
  for (let at = 0; at < samples.length; at += 1) view.setInt16(HEADER_BYTES + 2 * at, samples[at], true);
  return buffer;
}
