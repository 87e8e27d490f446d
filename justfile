# One prefill engine, one decode engine and the proxy, each in its own terminal:
#
#   just prefill | just decode | just proxy
#   just send_request, just benchmark, just latency, just eval, just gsm8k
#
# Without GPUs, on simulated engines: just eval_simulated, just latency_simulated, just orders.
# The last ones need an installation with '.[bench]', which brings `just` itself, too.
#
# Variables are set on the command line: just MODEL=Qwen/Qwen3-8B DECODE_GPU=3 decode
# If vLLM isn't on the path: just VLLM="path/to/vllm" prefill

MODEL := "Qwen/Qwen3-0.6B"
VLLM := "vllm"
PDPROXY := "pdproxy"

HOST := "127.0.0.1"
PREFILL_PORT := "8200"
DECODE_PORT := "8300"
PROXY_PORT := "8000"

# Port on which each engine offers its KV to the others. Two engines on one machine need two ports.
PREFILL_SIDE_PORT := "5600"
DECODE_SIDE_PORT := "5700"

PREFILL_GPU := "0"
DECODE_GPU := "1"
TENSOR_PARALLEL := "1"

# More flags for both engines, such as "--max-model-len 8192".
ENGINE_FLAGS := ""

# The load of `benchmark`.
INPUT_LENS := "128 1024 4096 8192"
OUTPUT_LEN := "128"
NUM_PROMPTS := "200"
REQUEST_RATE := "4"

# A plain engine with the same model, which `eval` and `latency` compare with.
PLAIN := "http://127.0.0.1:8100"

# The load of `eval` and `gsm8k`.
CLIENTS := "50"
EVAL_LIMIT := "500"

# The engines of `eval_simulated` and `latency_simulated`.
CONNECTOR := "nixl"

PYTHON := "python3"

LOCK := "uv pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --quiet --custom-compile-command 'just lock'"

# List the recipes
default:
    @just --list

# Install pdproxy from this checkout with all that its tests need
setup:
    python3 -m venv .venv
    .venv/bin/pip install -e '.[test]'

# Make the locks anew with uv, for changed dependencies; UPGRADE=--upgrade moves all of them to their newest releases
lock UPGRADE="":
    {{ LOCK }} {{ UPGRADE }} --extra test --extra build --extra site pyproject.toml -o requirements.lock
    {{ LOCK }} {{ UPGRADE }} --constraint requirements.lock --extra kubernetes --extra tracing pyproject.toml -o requirements-image-tokenizer.lock
    echo transformers | {{ LOCK }} {{ UPGRADE }} --constraint requirements.lock --excludes - --extra kubernetes --extra tracing pyproject.toml -o requirements-image.lock
    printf 'cyclonedx-bom\n' | {{ LOCK }} {{ UPGRADE }} --constraint requirements.lock - -o requirements-release.lock
    printf 'editables\nhatchling\n' | {{ LOCK }} {{ UPGRADE }} --constraint requirements.lock - -o requirements-build.lock

# Start the engine that computes prompts
prefill:
    CUDA_VISIBLE_DEVICES={{ PREFILL_GPU }} \
    VLLM_NIXL_SIDE_CHANNEL_HOST={{ HOST }} \
    VLLM_NIXL_SIDE_CHANNEL_PORT={{ PREFILL_SIDE_PORT }} \
    {{ VLLM }} serve {{ MODEL }} \
        --host {{ HOST }} \
        --port {{ PREFILL_PORT }} \
        --tensor-parallel-size {{ TENSOR_PARALLEL }} \
        --enable-prompt-tokens-details \
        --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' {{ ENGINE_FLAGS }}

# Start the engine that generates
decode:
    CUDA_VISIBLE_DEVICES={{ DECODE_GPU }} \
    VLLM_NIXL_SIDE_CHANNEL_HOST={{ HOST }} \
    VLLM_NIXL_SIDE_CHANNEL_PORT={{ DECODE_SIDE_PORT }} \
    {{ VLLM }} serve {{ MODEL }} \
        --host {{ HOST }} \
        --port {{ DECODE_PORT }} \
        --tensor-parallel-size {{ TENSOR_PARALLEL }} \
        --enable-prompt-tokens-details \
        --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' {{ ENGINE_FLAGS }}

# Start the proxy in front of both
proxy:
    {{ PDPROXY }} serve \
        --port {{ PROXY_PORT }} \
        --prefill {{ HOST }}:{{ PREFILL_PORT }} \
        --decode {{ HOST }}:{{ DECODE_PORT }}

# Send one chat through the proxy
send_request PROMPT="Name three rivers, and the sea that each one reaches.":
    curl --fail-with-body --silent --show-error http://{{ HOST }}:{{ PROXY_PORT }}/v1/chat/completions \
        -H 'Content-Type: application/json' \
        -d '{"model": "{{ MODEL }}", "max_tokens": 120, "messages": [{"role": "user", "content": "{{ PROMPT }}"}]}'
    @echo

# Measure one prompt length, in tokens (each length has its own seed; otherwise prompts would be cached)
benchmark_one INPUT_LEN:
    {{ VLLM }} bench serve \
        --host {{ HOST }} \
        --port {{ PROXY_PORT }} \
        --model {{ MODEL }} \
        --dataset-name random \
        --random-input-len {{ INPUT_LEN }} \
        --random-output-len {{ OUTPUT_LEN }} \
        --num-prompts {{ NUM_PROMPTS }} \
        --request-rate {{ REQUEST_RATE }} \
        --ignore-eos \
        --seed {{ INPUT_LEN }}

# Measure each prompt length of INPUT_LENS, one after the other
benchmark:
    for input_len in {{ INPUT_LENS }}; do \
        echo "== prompts of $input_len tokens"; \
        {{ just_executable() }} --justfile '{{ justfile() }}' \
            MODEL='{{ MODEL }}' VLLM='{{ VLLM }}' HOST={{ HOST }} PROXY_PORT={{ PROXY_PORT }} OUTPUT_LEN={{ OUTPUT_LEN }} \
            NUM_PROMPTS={{ NUM_PROMPTS }} REQUEST_RATE={{ REQUEST_RATE }} \
            benchmark_one $input_len || exit 1; \
    done

# Start a plain engine on a third GPU
plain PLAIN_GPU="2" PLAIN_PORT="8100":
    CUDA_VISIBLE_DEVICES={{ PLAIN_GPU }} {{ VLLM }} serve {{ MODEL }} \
        --host {{ HOST }} --port {{ PLAIN_PORT }} --tensor-parallel-size {{ TENSOR_PARALLEL }} {{ ENGINE_FLAGS }}

# Report latencies: first token, per output token, between tokens, whole answers; the proxy's and the plain engine's
latency:
    {{ PYTHON }} benchmarks/serving.py --url http://{{ HOST }}:{{ PROXY_PORT }} --url {{ PLAIN }} --model {{ MODEL }} \
        --requests {{ NUM_PROMPTS }} --rate {{ REQUEST_RATE }} --output {{ OUTPUT_LEN }}

# The same on simulated engines
latency_simulated REQUESTS="100" RATE="10":
    {{ PYTHON }} benchmarks/serving.py --simulated {{ CONNECTOR }} --requests {{ REQUESTS }} --rate {{ RATE }} --input 300 --output 64

# Measure on simulated engines what it gains to ask both engines at once
orders *ARGS:
    {{ PYTHON }} benchmarks/orders.py {{ ARGS }}

# See for 20 minutes whether memory, open files and tasks stay flat before simulated engines that fail at random
soak *ARGS:
    {{ PYTHON }} benchmarks/soak.py {{ ARGS }}

# Draw docs/images anew from docs/evidence
plots:
    {{ PYTHON }} benchmarks/decide.py --show --results docs/evidence/decide.json --plot docs/images/decide.png
    {{ PYTHON }} benchmarks/soak.py --redraw docs/evidence/soak.json --plot docs/images/soak.png

# Have CLIENTS clients at once ask the proxy and the plain engine the same: answers must be the same
eval *ARGS:
    {{ PYTHON }} benchmarks/evaluate.py --proxy http://{{ HOST }}:{{ PROXY_PORT }} --plain {{ PLAIN }} \
        --clients {{ CLIENTS }} --limit {{ EVAL_LIMIT }} {{ ARGS }}

# The same on simulated engines
eval_simulated *ARGS:
    {{ PYTHON }} benchmarks/evaluate.py --simulated {{ CONNECTOR }} --clients {{ CLIENTS }} {{ ARGS }}

# Solve school mathematics through the proxy: a wrong KV transfer shows as a worse score
gsm8k:
    lm_eval --model local-completions --tasks gsm8k --limit {{ EVAL_LIMIT }} \
        --model_args model={{ MODEL }},base_url=http://{{ HOST }}:{{ PROXY_PORT }}/v1/completions,num_concurrent={{ CLIENTS }},max_retries=3,tokenized_requests=False

# Run the tests
test *ARGS:
    pytest {{ ARGS }}

# Run everything that a change must pass
ci:
    .ci/run
