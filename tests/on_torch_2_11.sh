#!/bin/sh
# What runs on torch 2.11, the oldest that fxpar supports, with the Triton that belongs to
# it. Makes an environment in FOLDER, of several GB, or uses the one that is there.
#
#   tests/on_torch_2_11.sh FOLDER            PYTHON=python3.12: the Python of a new one
#   TORCH=2.15.0 tests/on_torch_2_11.sh FOLDER2     another torch, in a folder of its own
#
# Says of each step whether it went well; exits with 1 if one did not. STEPS="import demo"
# runs some of them.
set -u
folder=${1:?usage: tests/on_torch_2_11.sh FOLDER}
torch=${TORCH:-2.11.0}
cd "$(dirname "$0")/.." || exit 1

python=$folder/bin/python
if [ ! -x "$python" ]; then
  "${PYTHON:-python3}" -m venv "$folder" || exit 1
  # NumPy 2.4 is newer than what this torch and the packages of its time know.
  case $torch in 2.11.*) numpy='numpy<2.4' ;; *) numpy='numpy' ;; esac
  "$python" -m pip install --quiet "torch==$torch" "$numpy" || exit 1
  "$python" -m pip install --quiet "torch==$torch" "$numpy" --editable '.[test]' || exit 1
fi

export OMP_NUM_THREADS=1
export TORCHINDUCTOR_CACHE_DIR="$folder/inductor"
export CUDA_VISIBLE_DEVICES=
failed=

step() { # a name, and a command
  name=$1
  shift
  case " ${STEPS:-$name} " in *" $name "*) ;; *) return ;; esac
  if "$@" >"$folder/$name.log" 2>&1; then said=well; else said=FAILED failed=1; fi
  echo "$name: $said; $(tail -n 1 "$folder/$name.log")"
}

tests() { # a name, and tests
  name=$1
  shift
  step "$name" "$python" -m pytest -q -p no:cacheprovider -m 'not slow' "$@"
}

step import "$python" -c 'import torch, triton, numpy, fxpar.backend
print("torch", torch.__version__, "triton", triton.__version__, "numpy", numpy.__version__)'
step demo "$python" -m fxpar demo
tests ops tests/test_torch_2_11.py tests/test_imports.py
tests planning tests/test_planning.py tests/test_backend.py
tests passes tests/passes
tests fusion tests/fusion
step one_gpu "$python" benchmarks/one_gpu.py --try --json "$folder/one_gpu.json"
exit ${failed:-0}
