#!/bin/sh
# Runs the tests on another torch, with the Triton that belongs to it, in an environment
# of several GB that is made once.
#
#   tests/on_torch.sh VERSION [TEST...]      default: all that `make test` runs
#   FOLDER=...        where the environment is (.cache/torch-VERSION)
#   PYTHON=python3.12 the Python of a new one
#   STEPS="import demo tests one_gpu"        some of the steps
#
# Says of each step whether it went well; exits with 1 if one did not.
set -u
torch=${1:?usage: tests/on_torch.sh VERSION [TEST...]}
shift
cd "$(dirname "$0")/.." || exit 1
folder=${FOLDER:-.cache/torch-$torch}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

python=$folder/bin/python
if [ ! -x "$python" ]; then
  "${PYTHON:-python3}" -m venv "$folder" || exit 1
  # NumPy 2.4 is newer than what torch 2.11 and the packages of its time know.
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

step import "$python" -c 'import torch, triton, numpy, fxpar.backend
print("torch", torch.__version__, "triton", triton.__version__, "numpy", numpy.__version__)'
step demo "$python" -m fxpar demo
step tests "$python" -m pytest -q -p no:cacheprovider -n "${JOBS:-2}" --dist loadfile \
  --no-loadscope-reorder -m 'not slow' "$@"
step one_gpu "$python" benchmarks/one_gpu.py --try --json "$folder/one_gpu.json"
exit ${failed:-0}
