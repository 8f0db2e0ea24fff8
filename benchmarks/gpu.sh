#!/usr/bin/env bash
# Numerics and speed on one CUDA device in under four minutes, with PyTorch, rich and (for the tests) pytest alone.
#
#     bash benchmarks/gpu.sh                  # writes gpu.txt, gpu-tests.txt, gpu-training.txt and gpu-sampling.txt to ${OUT:-.}
#     DEVICE=cpu bash benchmarks/gpu.sh       # tries the script itself on tiny sizes
#
# What a bare machine lacks of them may lie in a directory of PYTHONPATH: pip install --target DIR pytest rich
# Each part may fail or run out of time; the others follow all the same, and the exit status is 1.
set -u
cd "$(dirname "$0")/.."
out=${OUT:-.}
export DEVICE=${DEVICE:-cuda} PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python}
mkdir -p "$out"
failed=0
deadline=235 # seconds, of all parts together

part() { # name, seconds at most, command: its output goes to a file and to the terminal
    local name=$1 limit=$2 began=$SECONDS left=$((deadline - SECONDS)) status
    shift 2
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        echo "$name: no time left for: $*" | tee -a "$out/gpu.txt"
        failed=1
        return
    fi
    echo "+ $*" | tee -a "$out/gpu-$name.txt"
    timeout "$limit" "$@" 2>&1 | tee -a "$out/gpu-$name.txt"
    status=${PIPESTATUS[0]}
    echo "$name: exit $status after $((SECONDS - began)) s: $*" | tee -a "$out/gpu.txt"
    [ "$status" -eq 0 ] || failed=1
}

rm -f "$out"/gpu.txt "$out"/gpu-{tests,training,sampling}.txt
"$python" - <<'PYTHON' | tee "$out/gpu.txt"
import os, platform
from importlib.util import find_spec

import torch

print(f"python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
if os.environ["DEVICE"] == "cuda":
    device = torch.cuda.get_device_properties(0)
    print(f"{device.name}, {device.total_memory / 2**30:.0f} GiB, capability {device.major}.{device.minor}")
found = [name for name in ("triton", "flash_attn", "pytest", "rich", "numpy", "lightning") if find_spec(name)]
print("installed:", ", ".join(found))
PYTHON

if [ "$DEVICE" = cuda ]; then
    training() {
        part training 60 "$python" benchmarks/training.py --device cuda --dtype bfloat16 --vocab-size 32768 \
            --tokens 16384 --repeats 5 "$@"
    }
    part tests 110 "$python" -m pytest tests/gpu -q -p no:cacheprovider
    training --models 12x768 --seq-lens 1024 --block-sizes 16 --backend flex --compile
    part sampling 30 "$python" benchmarks/sampling.py --device cuda --layers 12 --width 768 --heads 12 --kv-heads 12 \
        --batches 1 64 --prefixes 512 --rules first_hitting confidence_8 --no-uncached --repeats 20
    training --models 12x768 --seq-lens 1024 --block-sizes 16 --backend sdpa --compile
    training --models 8x512 --seq-lens 4096 --block-sizes 4 --backend flex --compile
    training --models 12x768 --seq-lens 1024 --block-sizes 16 --backend flex
else
    part tests 60 "$python" -m pytest tests/gpu -q -p no:cacheprovider -k "noise or cached or debug"
    part training 60 "$python" benchmarks/training.py --models 2x64 --seq-lens 64 --block-sizes 4 --tokens 128 \
        --vocab-size 64 --repeats 1 --backend sdpa
    part sampling 60 "$python" benchmarks/sampling.py --layers 1 --width 64 --heads 1 --kv-heads 1 --batches 1 \
        --prefixes 16 --rules confidence_8 --new-tokens 32 --no-uncached --repeats 1 --vocab-size 64
fi
exit "$failed"
