#!/usr/bin/env bash
# Plays a newcomer's first session and prints it as a terminal shows it, each line after the seconds since its command
# began: clone, quick start, a prompt of one's own, a video piped into another program, Ctrl-C, typos, a plan.
#     bash scripts/recording.sh >docs/recording.txt
set -uo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
# Nothing that an earlier build left; what pip has downloaded before may stay.
PIP_CACHE_DIR=${PIP_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/pip} XDG_CACHE_HOME=$work/cache
export PIP_CACHE_DIR XDG_CACHE_HOME

play() { # a command line, run by a shell of its own
    printf '\n$ %s\n' "$1"
    bash -o pipefail -c "${2:-$1}" 2>&1 | python3 -u -c '
import sys, time
begun = last = time.monotonic()
longest = 0.0
for line in sys.stdin:
    now = time.monotonic()
    longest, last = max(longest, now - last), now
    print(f"{now - begun:7.1f}  {line}", end="", flush=True)
now = time.monotonic()
print(f"{now - begun:7.1f}  (ended; never silent for more than {max(longest, now - last):.1f} s)")' | sed "s#$work#~#g; /WARNING: Location/d"
    printf '         exit code %s\n' "${PIPESTATUS[0]}"
}

count='import av, sys
video = av.open(sys.stdin.buffer, format="yuv4mpegpipe")
frames = sum(1 for _ in video.decode(video=0))
stream = video.streams.video[0]
print(f"{frames} frames of {stream.width}x{stream.height} at {stream.average_rate}/s")'
# shellcheck disable=SC2016 # the terminal that is recorded expands it
third='set -m
env --default-signal=INT seko-run run artifacts/quickstart --chunks 1000 -o out/long.mp4 2>&1 &
run=$!
while ! three_chunks; do sleep 0.1; done
kill -INT $run; wait $run'
third=${third/three_chunks/python -c \'import av, glob, sys
(file,) = glob.glob(\"out\/.long.mp4.seko-*\/new\")
sys.exit(sum(1 for _ in av.open(file).decode(video=0)) < 24)\' 2>\/dev\/null}

date -u +"A session of %Y-%m-%d, on $(nproc) cores without a GPU. Left: seconds since the command began."
play 'git clone SEKO seko' "git clone -q '$repository' seko"
cd seko || exit
play 'bash scripts/quickstart.sh'
export PATH=$PWD/.venv/bin:$PATH
play 'bash scripts/quickstart.sh "a green square bouncing on a dark background"'
play 'bash scripts/quickstart.sh "an elephant on a bicycle"'
play 'seko-run run artifacts/quickstart --chunks 3 --prompt "a red disc bouncing on a dark background" -o - | python count_frames.py' \
    "seko-run run artifacts/quickstart --chunks 3 --prompt 'a red disc bouncing on a dark background' -o - | python -c '$count'"
play 'seko-run run artifacts/quickstart --chunks 1000 -o out/long.mp4    (Ctrl-C once three chunks are in the file)' "$third"
play 'python -c "..."    (what is in out/long.mp4)' \
    "python -c 'import av; print(sum(1 for _ in av.open(\"out/long.mp4\").decode(video=0)), \"frames play\")'"
play 'seko-export build --kv nonsense -o x'
play 'seko-export bild'
play 'seko-run run artifacts/quickstart --chnks 3'
play 'seko-export build --preset wan-14b -o x'
play 'seko-export plan --preset wan-14b --gpu rtx4090'
