// The socket's binary messages: a header of 32 bytes, little endian, then the payload. See docs/serving.md.
export const VERSION = 1;
export const HEADER_BYTES = 32;
export const CODECS = { 1: "h264", 2: "vp8", 3: "rgb24", 4: "mjpeg" };

/** Parse one binary message; throws a RangeError if it is none of this version. */
export function parseMedia(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < HEADER_BYTES || view.getUint8(0) !== VERSION) {
    throw new RangeError("not a media message of this version");
  }
  const flags = view.getUint8(2);
  return {
    codec: CODECS[view.getUint8(1)],
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
