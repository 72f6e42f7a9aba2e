#!/usr/bin/env bash
# The lower bounds of the run-time dependencies in pyproject.toml, with nothing else that needs JAX,
# and the newest packages that there are with all extras, each in an environment of its own: whether
# a part of the tests passes there. `versions.sh [oldest] [newest] [quick]`: quick takes few tests.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 MPLBACKEND=Agg PYTHONPATH=$PWD
TOOLS=(pytest pytest-xdist hypothesis chex tqdm)
TESTS=(tests/test_{contract,stationarity,sampling,warmstart,wrong_likelihood}.py tests/faults/test_runs.py)
# What the extras are for.
OTHERS=(tests/test_{plots,predict,snapshots,wrappers}.py)
QUICK=(tests/faults/test_runs.py optax_smile/samplers)
TOLD='^(jax|jaxlib|optax|flax|numpy|orbax-checkpoint|safetensors|arviz|chex)=='

# What users install, one requirement a line; with "==" for ">=" where the oldest is wanted.
requirements() {
  python3 - "$1" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras, is_oldest = project["optional-dependencies"], sys.argv[1] == "oldest"
names = ("storage",) if is_oldest else ("flax", "storage", "diagnostics", "arviz", "eval", "plots", "progress")
wanted = sum((extras[name] for name in names), project["dependencies"])
print(*(x.replace(">=", "==") if is_oldest else x for x in wanted), sep="\n")
PYTHON
}

ages=() quick=
for word in "${@:-oldest newest}"; do
  [ "$word" = quick ] && quick=yes || ages+=($word)
done
for age in "${ages[@]}"; do
  python3 -m venv "$work/$age"
  requirements "$age" > "$work/$age.txt"
  tests=("${TESTS[@]}")
  [ "$age" = oldest ] || { tests+=("${OTHERS[@]}") && TOOLS+=(cloudpickle equinox grain); }
  [ -z "$quick" ] || tests=("${QUICK[@]}")
  "$work/$age/bin/pip" install -qq --upgrade --upgrade-strategy eager . -r "$work/$age.txt" "${TOOLS[@]}"
  echo "== $age: $("$work/$age/bin/pip" freeze | grep -E "$TOLD" | tr '\n' ' ')"
  # Packages of another time deprecate what is theirs.
  "$work/$age/bin/python" -m pytest -q -n 3 -p no:cacheprovider \
    -W default::DeprecationWarning "${tests[@]}"
done
