// Sound out, by an AudioWorklet that leads the video's clock, and a microphone or a file in, as pieces of a voice.
const DECODERS = { opus: "opus", aac: "mp4a.40.2" };
export const VOICE_RATE = 16_000;
const PIECE = 1_600; // samples of a microphone in one message: 0.1 s
const KEPT_MS = 1000; // where nobody has pressed anything for so long, what came before sound begins is in the past

/** Return the sound codecs that this page can play, the best first; none where a page is not secure. */
export async function playable() {
  if (!("AudioWorkletNode" in window) || !window.isSecureContext) return [];
  const found = [];
  if ("AudioDecoder" in window) {
    for (const [name, codec] of Object.entries(DECODERS)) {
      const config = { codec, sampleRate: name === "opus" ? 48_000 : VOICE_RATE, numberOfChannels: 1 };
      try {
        if ((await AudioDecoder.isConfigSupported(config)).supported) found.push(name);
      } catch { /* an unknown codec */ }
    }
  }
  return [...found, "pcm"];
}

/** The sound of one session. `onclock` is told where it stands, { pts, at, running } in microseconds, and the loudest sample. */
export class Sound {
  constructor(facts, onclock) {
    this.facts = facts;
    this.onclock = onclock;
    this.context = new AudioContext({ sampleRate: facts.rate, latencyHint: "interactive" });
    this.opened = this.open();
  }

  async open() {
    await this.context.audioWorklet.addModule(new URL("./speaker.js", import.meta.url));
    this.node = new AudioWorkletNode(this.context, "speaker", { outputChannelCount: [1] });
    this.gain = new GainNode(this.context);
    this.node.connect(this.gain).connect(this.context.destination);
    this.node.port.onmessage = ({ data }) => {
      const latency = (this.context.outputLatency || this.context.baseLatency || 0) * 1e6;
      const at = (performance.timeOrigin + performance.now()) * 1000;
      this.onclock({ pts: data.pts - latency, at, running: data.running }, data.peak);
    };
    await this.begin();
    if (this.facts.codec in DECODERS) this.reset();
  }

  /** Begin to run; a browser may let nothing be heard until somebody presses something. */
  async begin() {
    const late = setTimeout(() => { this.late = !navigator.userActivation?.hasBeenActive; }, KEPT_MS);
    const press = () => { this.context.resume(); };
    for (const kind of ["click", "keydown"]) document.addEventListener(kind, press);
    await this.context.resume();
    for (const kind of ["click", "keydown"]) document.removeEventListener(kind, press);
    clearTimeout(late);
    this.past = this.late ? this.next : 0;
    this.late = false;
  }

  reset() {
    const { codec, rate } = this.facts;
    this.decoder = new AudioDecoder({
      output: (audio) => {
        const samples = new Float32Array(audio.numberOfFrames);
        audio.copyTo(samples, { planeIndex: 0, format: "f32-planar" });
        const pts = audio.timestamp - this.facts.delay / rate * 1e6;
        audio.close();
        this.play(samples, pts);
      },
      error: (error) => { this.failed = error.message; },
    });
    this.decoder.configure({ codec: DECODERS[codec], sampleRate: rate, numberOfChannels: 1 });
  }

  async take(media) {
    if (media.first + media.count <= (this.next ?? 0)) return; // a restarted server makes chunks again
    const next = this.next = media.first + media.count;
    if (this.late) return;
    await this.opened;
    if (next <= this.past) return;
    if (this.facts.codec === "pcm") {
      const view = new DataView(media.payload.buffer, media.payload.byteOffset, media.payload.byteLength);
      const samples = Float32Array.from({ length: media.count }, (_, at) => view.getInt16(2 * at, true) / 32768);
      this.play(samples, media.pts);
    } else {
      this.decoder.decode(new EncodedAudioChunk({ type: "key", timestamp: media.pts, data: media.payload }));
    }
  }

  play(samples, pts) { this.node.port.postMessage({ samples, pts }, [samples.buffer]); }

  /** Begin, or after a pause go on, to play. */
  async start() { await this.opened; this.node.port.postMessage({ playing: true }); }

  async stop() { await this.opened; this.node.port.postMessage({ playing: false }); }

  /** Drop what was taken and is not heard yet. */
  async drop() {
    await this.opened;
    this.node.port.postMessage({ dropped: true });
    if (!this.decoder) return;
    this.decoder.close();
    this.reset();
  }

  async mute(muted) { await this.opened; this.gain.gain.value = muted ? 0 : 1; }

  /** Return a stream of what is heard, for a recording. */
  async stream() {
    await this.opened;
    this.recorded ??= new MediaStreamAudioDestinationNode(this.context);
    this.gain.connect(this.recorded);
    return this.recorded.stream;
  }

  async close() { await this.opened; await this.context.close(); }
}

const whole = (samples) => Int16Array.from(samples, (sample) => Math.round(Math.max(-1, Math.min(1, sample)) * 32767));

/** Send the microphone's pieces until `stop`; `gone()` is called where it was taken away. */
export class Microphone {
  async start(send, gone) {
    this.input = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: true } });
    try {
      this.context = new AudioContext({ sampleRate: VOICE_RATE });
      await this.context.audioWorklet.addModule(new URL("./speaker.js", import.meta.url));
      this.node = new AudioWorkletNode(this.context, "listener", { processorOptions: { piece: PIECE } });
      if (this.stopped) { await this.release(); return; }
      this.node.port.onmessage = ({ data }) => send(whole(data));
      this.input.getTracks()[0].onended = gone;
      new MediaStreamAudioSourceNode(this.context, { mediaStream: this.input }).connect(this.node);
    } catch (error) {
      await this.release();
      throw error;
    }
  }

  async stop() {
    this.stopped = true;
    if (!this.node) return; // `start` sees it
    this.node.port.onmessage = null; // a piece that is under way would begin another voice
    await this.release();
  }

  async release() {
    for (const track of this.input.getTracks()) track.stop();
    await this.context?.close();
  }
}

/** Read a sound file as one voice, and send it in pieces within the server's limits; the last one ends the voice. */
export async function sendFile(file, limits, send) {
  const context = new OfflineAudioContext(1, 1, VOICE_RATE);
  const decoded = await context.decodeAudioData(await file.arrayBuffer())
    .catch(() => { throw new Error(`${file.name} cannot be read as sound`); });
  const mixed = new OfflineAudioContext(1, Math.max(1, decoded.length), VOICE_RATE);
  const source = new AudioBufferSourceNode(mixed, { buffer: decoded });
  source.connect(mixed.destination);
  source.start();
  const samples = whole((await mixed.startRendering()).getChannelData(0));
  const piece = limits.audio_bytes / samples.BYTES_PER_ELEMENT;
  for (let at = 0; at < samples.length; at += piece) {
    send(samples.subarray(at, at + piece), at + piece >= samples.length);
    await new Promise((resolve) => { setTimeout(resolve, 2000 / limits.messages_per_s); }); // half of them: acks need the rest
  }
  return samples.length / VOICE_RATE;
}
