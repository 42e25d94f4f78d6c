// Records what is shown and heard, and saves it as a file.
const TYPES = ["video/mp4;codecs=avc1.42E01F,mp4a.40.2", "video/webm;codecs=vp9,opus", "video/webm;codecs=vp8,opus", "video/webm"];
const TELL_MS = 250;

export class Recorder {
  /** Begin; `sound` is a stream of what is heard, if there is any. Frames come by `add`; `tell` gets minutes and seconds. */
  constructor(width, height, sound, tell) {
    this.canvas = document.createElement("canvas");
    [this.canvas.width, this.canvas.height] = [width, height];
    this.context = this.canvas.getContext("bitmaprenderer");
    const stream = new MediaStream([
      ...this.canvas.captureStream().getVideoTracks(), ...(sound ? sound.getAudioTracks() : []),
    ]);
    const mimeType = TYPES.find((type) => MediaRecorder.isTypeSupported(type));
    this.parts = [];
    this.recorder = new MediaRecorder(stream, { mimeType, videoBitsPerSecond: 8_000_000 });
    this.recorder.ondataavailable = ({ data }) => this.parts.push(data);
    this.recorder.start();
    const began = performance.now();
    this.timer = setInterval(() => {
      const seconds = Math.floor((performance.now() - began) / 1000);
      tell(`${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`);
    }, TELL_MS);
  }

  add(bitmap) {
    this.context.transferFromImageBitmap(bitmap);
    this.begun = true;
  }

  /** End; return the file, or nothing where no frame was shown. */
  stop() {
    clearInterval(this.timer);
    return new Promise((resolve) => {
      this.recorder.onstop = () => resolve(this.begun && new Blob(this.parts, { type: this.recorder.mimeType }));
      this.recorder.stop();
    });
  }
}

export function save(blob, name = `seko.${blob.type.includes("mp4") ? "mp4" : "webm"}`) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
