// A webcam as a control describes it: shown beside the video, and sent frame by frame.
const QUALITY = 0.8; // of the JPEGs
const SMALLER = 0.5; // where one has more bytes than the server takes

export class Webcam {
  /** Show what the camera sees in `screen`, and send JPEGs of a size by `send(jpeg, dropped, seenAt)`, which says whether it did.
      `gone()` is called where the camera was taken away. */
  constructor(screen, send, gone) {
    Object.assign(this, { screen, send, gone, sent: 0, dropped: 0, waiting: 0, busy: false });
  }

  get running() { return Boolean(this.media); }

  /** Begin; an error says why the camera cannot be used. */
  async start({ width, height, fps }, most) {
    const mine = this.asked = {};
    const media = await navigator.mediaDevices.getUserMedia({
      audio: false, video: { width: { ideal: width }, height: { ideal: height }, frameRate: { ideal: fps } },
    });
    if (mine !== this.asked) { // it was turned off meanwhile
      for (const track of media.getTracks()) track.stop();
      return;
    }
    this.media = media;
    media.getVideoTracks()[0].onended = () => { this.stop(); this.gone(); };
    this.screen.srcObject = this.media;
    await this.screen.play();
    const canvas = new OffscreenCanvas(width, height);
    Object.assign(this, { canvas, most, context: canvas.getContext("2d"), sent: 0, dropped: 0, waiting: 0 });
    this.timer = setInterval(() => this.take(), 1000 / fps);
  }

  /** Send the picture that is seen now: its middle, as large as the model takes it. */
  async take() {
    const { screen, canvas, context } = this, { videoWidth: wide, videoHeight: high } = screen;
    if (!wide || this.busy) { if (wide) this.waiting += 1; return; }
    this.busy = true;
    const seenAt = performance.now();
    const scale = Math.max(canvas.width / wide, canvas.height / high);
    const [width, height] = [canvas.width / scale, canvas.height / scale];
    context.drawImage(screen, (wide - width) / 2, (high - height) / 2, width, height, 0, 0, canvas.width, canvas.height);
    let blob = await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
    if (blob.size > this.most) blob = await canvas.convertToBlob({ type: "image/jpeg", quality: SMALLER * QUALITY });
    const done = blob.size <= this.most && this.running && this.send(await blob.arrayBuffer(), this.waiting, seenAt);
    this.sent += done;
    this.waiting = done ? 0 : this.waiting + 1;
    this.dropped += !done;
    this.busy = false;
  }

  stop() {
    clearInterval(this.timer);
    for (const track of this.media?.getTracks() ?? []) track.stop();
    this.asked = this.media = this.screen.srcObject = undefined;
  }
}
