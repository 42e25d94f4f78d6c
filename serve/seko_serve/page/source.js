// Where a page has no WebCodecs, as over plain http: fragmented MP4 and AAC in a <video>, by MediaSource.
const VIDEO = 'video/mp4; codecs="avc1.42E01F"', SOUND = "audio/aac";
const KEPT_S = 10; // of what was shown
const STUCK_MS = 500; // without progress, though there is something to play

export const playsVideo = () => "MediaSource" in window && MediaSource.isTypeSupported(VIDEO)
  && "requestVideoFrameCallback" in HTMLVideoElement.prototype;
export const playsSound = () => playsVideo() && MediaSource.isTypeSupported(SOUND);

/** One kind of media, appended in order. A sequence: each part begins where the one before it ends. */
class Track {
  constructor(source, type, offset = 0) {
    this.parts = [];
    this.buffer = source.addSourceBuffer(type);
    this.buffer.mode = "sequence";
    this.buffer.timestampOffset = offset;
    this.buffer.onupdateend = () => this.next();
  }

  add(part) {
    this.parts.push(part);
    this.next();
  }

  next() {
    if (!this.buffer.updating && this.parts.length) this.buffer.appendBuffer(this.parts.shift());
  }

  forget(until) {
    if (!this.buffer.updating && this.buffer.buffered.length && this.buffer.buffered.start(0) < until - KEPT_S) {
      this.buffer.remove(0, until);
    }
  }
}

/** Takes the messages that the worker of player.js takes, and answers them in the same form by `tell`. */
export class SourcePlayer {
  constructor(element, tell) {
    Object.assign(this, { element, tell, copying: false, muted: false, silent: false });
    element.onerror = () => tell({ failed: element.error.message });
  }

  postMessage({ ready, again, media, copying }) {
    if (ready && !again) this.opened = this.open(ready);
    else if (media) this.take(media);
    else if (copying !== undefined) this.copying = copying;
  }

  async open({ fps, audio }) {
    Object.assign(this, { fps, frames: new Map(), keys: [], came: 0, painted: 0, tracks: undefined });
    const source = new MediaSource();
    this.element.src = URL.createObjectURL(source);
    await new Promise((resolve) => { source.addEventListener("sourceopen", resolve, { once: true }); });
    URL.revokeObjectURL(this.element.src);
    this.tracks = { video: new Track(source, VIDEO), ...(audio && { sound: new Track(source, SOUND, -audio.delay / audio.rate) }) };
    this.element.requestVideoFrameCallback((_, { mediaTime }) => this.shown(source, mediaTime));
    this.start();
    clearInterval(this.watch);
    this.watch = setInterval(() => this.askForMore(), STUCK_MS);
  }

  /** Where the browser stands still before what it has, as it does once it had to wait for sound a few times, it wants
      more at hand: let the server send another chunk. */
  askForMore() {
    const { currentTime, paused, readyState } = this.element, stuck = currentTime === this.stood;
    this.stood = currentTime;
    if (paused || !stuck || readyState >= HTMLMediaElement.HAVE_FUTURE_DATA) return;
    const whole = [...this.frames.values()].find(({ last, asked }) => last && !asked);
    if (!whole) return;
    whole.asked = true;
    this.tell({ shown: whole.chunk });
  }

  async take(media) {
    await this.opened;
    if (!media.sound) {
      if (!this.came) this.tell({ first: media.pts });
      if (media.key) this.keys.push((this.came - 0.5) / this.fps);
      this.frames.set(this.came, { number: media.first, chunk: media.chunk, last: media.last });
      this.came += 1;
    }
    this.tracks[media.sound ? "sound" : "video"]?.add(media.payload);
  }

  /** A frame was shown; `frames` has those that came and were not shown, by their place in time. */
  async shown(source, time) {
    if (source.readyState !== "open") return;
    this.element.requestVideoFrameCallback((_, { mediaTime }) => this.shown(source, mediaTime));
    let seen;
    for (const [place, { number, chunk, last }] of this.frames) { // several, where the browser left frames out
      if (place > Math.round(time * this.fps)) break;
      this.frames.delete(place);
      seen = { chunk, number };
      if (last) this.tell({ shown: chunk });
    }
    if (seen) this.tell({ painted: this.painted += 1, buffered: this.frames.size, ...seen });
    this.tracks.sound?.forget(time - KEPT_S);
    while (this.keys[1] <= time - KEPT_S) this.keys.shift();
    this.tracks.video.forget(this.keys[0]); // up to a key frame: what lies before the next one would go, too
    if (this.copying) this.tell({ copy: await createImageBitmap(this.element) });
  }

  // What the page does with sound.
  /** Play; a browser may let nothing be heard until somebody presses something. */
  start() {
    const { muted } = this.element;
    return this.element.play().catch(({ name, message }) => {
      if (name === "AbortError") return; // a pause came first
      if (name !== "NotAllowedError" || muted) { this.tell({ failed: message }); return; }
      if (this.silent) return; // another call plays it
      const heard = () => {
        if (!navigator.userActivation.hasBeenActive) return;
        for (const kind of ["click", "keydown"]) document.removeEventListener(kind, heard);
        this.silent = false;
        this.mute(this.muted);
      };
      for (const kind of ["click", "keydown"]) document.addEventListener(kind, heard);
      this.silent = true;
      this.mute(this.muted);
      this.start();
    });
  }

  stop() { this.element.pause(); }

  mute(muted) {
    this.muted = muted;
    this.element.muted = muted || this.silent;
  }

  stream() { return this.element.captureStream?.(); }

  close() {
    clearInterval(this.watch);
    this.element.pause();
    this.element.removeAttribute("src");
    this.element.load();
  }
}
