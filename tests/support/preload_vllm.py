import vllm
