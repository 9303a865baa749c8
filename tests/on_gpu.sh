#!/bin/sh
# What runs on a machine with one NVIDIA GPU: tests of kernels, and tests of ranks that
# share the GPU and meet by NCCL. Needs torch for CUDA, pytest with xdist and timeout,
# transformers; no installed fxpar.
#
#   tests/on_gpu.sh FOLDER [SECONDS]     logs go to FOLDER; a step has so many seconds
#
# Says of each step how it went; exits with 1 if one did not go well. STEPS="kernels
# ranks" runs some of them; WORKERS=8: how many tests run at a time; PYTHON=python3.12.
set -u
folder=${1:?usage: tests/on_gpu.sh FOLDER [SECONDS]}
seconds=${2:-1800}
workers=${WORKERS:-6}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.." || exit 1
mkdir -p "$folder"

# A checkout that was never installed is no backend that Dynamo finds by its name.
site=$(mktemp -d)
mkdir "$site/fxpar-0.dist-info"
printf 'Metadata-Version: 2.1\nName: fxpar\nVersion: 0\n' >"$site/fxpar-0.dist-info/METADATA"
printf '[torch_dynamo_backends]\nfxpar = fxpar.backend:fxpar\n' \
  >"$site/fxpar-0.dist-info/entry_points.txt"
export PYTHONPATH="$PWD:$site:${PYTHONPATH:-}"
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
export TORCHINDUCTOR_CACHE_DIR="$site/inductor" TRITON_CACHE_DIR="$site/triton"
failed=

step() { # a name, and a command
  name=$1
  shift
  case " ${STEPS:-$name} " in *" $name "*) ;; *) return ;; esac
  begun=$(date +%s)
  if timeout -s INT -k 20 "$seconds" "$@" >"$folder/$name.log" 2>&1; then
    said=well
  else
    said=FAILED failed=1
  fi
  echo "$name: $said, $(($(date +%s) - begun)) s; $(tail -n 1 "$folder/$name.log")"
}

tests() { # a name, variables, and what pytest is given
  name=$1 variables=$2
  shift 2
  step "$name" env $variables "$python" -m pytest -q -p no:cacheprovider --timeout 150 \
    --failures "$folder/$name.failures" "$@"
}

"$python" -c 'import torch, triton, numpy, fxpar.backend
print("torch", torch.__version__, "triton", triton.__version__, "numpy", numpy.__version__)
print(torch.cuda.get_device_name(), torch.cuda.nccl.version())' || exit 1

tests kernels "" -n 3 tests/fusion/kernels/test_templates.py \
  tests/passes/test_random.py \
  tests/features/sequences/test_attention_kernels.py -k 'gpu or cuda or attention_kernels'
e2e=tests/e2e
whole=whole_steps_are_those_of_one_device models=models_train_as_on_one_device
tests ranks TEST_DEVICE=cuda -n "$workers" -m 'slow or not slow' \
  $e2e/test_training.py::test_generated_kernels_of_two_ranks \
  "$e2e/test_training.py::test_op_by_op[llama/1-dp=2]" \
  "$e2e/test_training.py::test_op_by_op[resnet-dp=2]" \
  $e2e/test_expert_training.py::test_generated_kernels \
  $e2e/test_expert_training.py::test_rows_sent_by_exact_numbers \
  $e2e/test_pipelines.py::test_a_model_trains_with_inductor \
  "$e2e/test_pipelines.py::test_$models[llama-pp=2-4]" \
  "$e2e/test_pipelines.py::test_$models[resnet-pp=2-2]" \
  "$e2e/test_pipelines.py::test_$whole[pp=2-1f1b-global]" \
  "$e2e/test_pipelines.py::test_$whole[pp=2-zero_bubble-global]" \
  $e2e/test_microbatched_training.py::test_a_model_trains_with_inductor \
  $e2e/test_microbatched_training.py::test_$whole \
  "$e2e/test_microbatched_training.py::test_$models[bert-tp=2-sharded-propagate]" \
  "$e2e/test_microbatched_training.py::test_$models[resnet-dp=2-whole-propagate]" \
  $e2e/test_flex_training.py \
  $e2e/test_sequences.py::test_generated_kernels \
  $e2e/test_sequences.py::test_a_few_tokens_are_cut_out \
  "$e2e/test_sequences.py::test_op_by_op[cp=2-whole]" \
  "$e2e/test_sequences.py::test_op_by_op[cp=2-sharded]" \
  $e2e/test_uneven_dims.py::test_two_ranks \
  $e2e/test_train_step.py::test_as_one_device \
  $e2e/test_train_step.py::test_two_ranks \
  $e2e/test_sharded_training.py::test_generated_kernels
tests programs TEST_DEVICE=cuda -n "$workers" -m 'not slow' tests/passes/test_fuzz.py \
  tests/border/test_model_zoo.py tests/trials/test_scripts_by_default.py
step calibrate "$python" -m fxpar calibrate --limit 30 --out "$folder/hardware.json"
step demo "$python" -m fxpar demo
exit ${failed:-0}
