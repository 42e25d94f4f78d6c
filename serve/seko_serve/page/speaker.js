// Audio worklets: one plays samples and tells where it stands, the other collects a microphone's.
const TOLD_EVERY = 8; // calls of 128 samples

class Speaker extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = []; // { samples, pts, at }
    this.playing = false;
    this.calls = 0;
    this.pts = undefined;
    this.peak = 0;
    this.port.onmessage = ({ data }) => {
      if (data.samples) {
        this.queue.push({ ...data, at: 0 });
        this.pts ??= data.pts;
      } else if (data.dropped) {
        this.queue = [];
      } else {
        this.playing = data.playing;
      }
    };
  }

  process(_, [[output]]) {
    let filled = 0;
    while (this.playing && filled < output.length && this.queue.length) {
      const head = this.queue[0];
      const part = head.samples.subarray(head.at, head.at + output.length - filled);
      output.set(part, filled);
      for (const sample of part) this.peak = Math.max(this.peak, Math.abs(sample));
      filled += part.length;
      head.at += part.length;
      this.pts = head.pts + head.at / sampleRate * 1e6;
      if (head.at === head.samples.length) this.queue.shift();
    }
    const running = filled === output.length;
    if (this.pts !== undefined && (running !== this.running || ++this.calls % TOLD_EVERY === 0)) {
      this.port.postMessage({ pts: this.pts, running, peak: this.peak });
      this.peak = 0;
    }
    this.running = running;
    return true;
  }
}

class Listener extends AudioWorkletProcessor {
  constructor({ processorOptions: { piece } }) {
    super();
    this.piece = new Float32Array(piece);
    this.filled = 0;
  }

  process([[input]]) {
    for (const sample of input ?? []) {
      this.piece[this.filled++] = sample;
      if (this.filled === this.piece.length) {
        this.port.postMessage(this.piece.slice());
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("speaker", Speaker);
registerProcessor("listener", Listener);
