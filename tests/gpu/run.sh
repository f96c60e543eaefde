#!/usr/bin/env bash
# Does the engine work on this machine's GPU, and how fast? Tests, then measurements; the last line
# is JSON. Makes no environment and fetches nothing: PYTHON names one that has a CUDA torch, else
# python3 is tried. `encode`, also where nothing is said, ends within six minutes, `generate` within
# eight, with an error if anything failed.
set -uo pipefail
part=${1:-encode}
case $part in
encode) tests=(test_encode_gpu.py test_varlen_gpu.py) for_tests=150 for_speed=140 options=() ;;
generate) tests=(test_spans_gpu.py test_generate_gpu.py) for_tests=220 for_speed=180 options=(--graphs) ;;
*)
	echo "say encode or generate, not $part" >&2
	exit 2
	;;
esac
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

timeout 60 "$python" - <<'CHECK' || exit 1
import importlib.util
import sys

needed = ["torch", "transformers", "tokenizers", "safetensors", "numpy", "pytest"]
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}; say PYTHON=… to use another")
import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} of {sys.executable} sees no CUDA device")
if torch.cuda.get_device_capability() < (8, 0):
    sys.exit(f"{torch.cuda.get_device_name()} is older than compute capability 8.0")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {sys.executable}")
CHECK

# The project's own settings of pytest name plugins that need not be here.
timeout "$for_tests" "$python" -m pytest -c tests/gpu/pytest.ini --rootdir . \
	--confcutdir tests/gpu -m gpu "${tests[@]/#/tests/gpu/}" -p no:cacheprovider
tested=$?
speed=$(timeout "$for_speed" "$python" "tests/gpu/${part}_speed.py" "${options[@]}" \
	| tee /dev/stderr | tail -n 1)
measured=$?
[ "$measured" -eq 0 ] || speed=null
printf '{"tests_exit": %d, "speed_exit": %d, "speed": %s}\n' "$tested" "$measured" "$speed"
[ "$tested" -eq 0 ] && [ "$measured" -eq 0 ]
