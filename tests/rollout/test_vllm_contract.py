"""What grpo-ext relies on inside vLLM, pinned for the releases that have been read: 0.31, 0.32 and 0.33.

One hash for each source, oldest release first, read from the files, because an import of vLLM takes seconds.
After reading what changed: `python tests/rollout/test_vllm_contract.py [FOLDER]` prints the hashes of a release.
"""

import ast
import hashlib
import importlib.util
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.find_spec("vllm")
RL = "entrypoints/serve/dev/rlhf/api_router.py entrypoints/rl/online/api_router.py"
CONTRACT = {
    # rollout/vllm/plugin.py: the engine `gloo`, and weights in place on a CPU
    "distributed/weight_transfer/factory.py": {"WeightTransferEngineFactory": "b9642a499ed10a58"},
    "model_executor/layers/utils.py": {
        "check_cpu_sgl_kernel": "b61d0f683f4265c8",
        "dispatch_cpu_unquantized_gemm": "83c37c89a715d31d d0cc00dbd80cb25d",
    },
    # and prompts whose images have all their tokens, which a server takes beside images
    "multimodal/processing/processor.py": {
        "BaseMultiModalProcessor._apply_prompt_updates": "2dcac751292b2467",
        "BaseMultiModalProcessor._find_mm_placeholders": "692e945fb24667c2",
    },
    "entrypoints/scale_out/token_in_token_out/protocol.py": {
        "GenerateRequest": "09aca573d041e6bc",
        "GenerateResponse": "823212b2c9da9b0d",
    },
    # rollout/vllm/engine.py: its base, who calls it, and the layout of weights on a GPU
    "distributed/weight_transfer/base.py": {
        "WeightTransferEngine": "544e09a260a0f481 e93ecb8cf6b43dd1",
        "WeightTransferInitInfo": "d4ffb0f38ebe1186",
        "WeightTransferUpdateInfo": "91787b9b95037347",
    },
    "v1/worker/gpu_worker.py": {
        "Worker.init_weight_transfer_engine": "d8493536a4671584",
        "Worker.start_weight_update": "edcd24c26603d749",
        "Worker.update_weights": "bf50d8e3e91bf8f0 39318660a8aab399",
        "Worker.finish_weight_update": "f6eef1fb4abd246c a4ffc13286d07841",
    },
    "model_executor/model_loader/reload/layerwise.py": {
        "initialize_layerwise_reload": "fc056d67cc05f5dd",
        "finalize_layerwise_reload": "bccf179d5b05f178",
    },
    # rollout/vllm/transfer.py: what a server answers; its file has moved since 0.31
    RL: {
        "init_weight_transfer_engine": "309389a81983d756 a4898e45e97b1163",
        "start_weight_update": "6c4feb692f1f2256 679a990a2097ac16",
        "update_weights": "0573b00fc87152a4 ab78658171c2f63c",
        "finish_weight_update": "520e1fa0fdb6bf2c f5d86c6e78c6ae19",
    },
    "entrypoints/serve/dev/cache/api_router.py": {
        "reset_prefix_cache": "dd66b7369d48c3ab",
        "reset_encoder_cache": "da537b2aa1d7efe9",
    },
    "entrypoints/serve/dev/server_info/api_router.py": {"show_server_info": "107459dce39241d1"},
    # rollout/vllm/requester.py: log-probabilities of the tokens that were kept are finite
    "v1/sample/sampler.py": {
        "Sampler.forward": "9e5f32f74f48aa75 a4a63d751cc780bc",
        "Sampler.sample": "9d8f0d0456c27350",
        "Sampler.gather_logprobs": "87c2459e05487ad1",
    },
    "v1/sample/ops/topk_topp_sampler.py": {"apply_top_k_top_p": "ae859da2fa282663 6571bb1e50de9e4b"},
}


def fingerprint(root: Path, files: str, name: str) -> str:
    """Hash of the source of a function or class below `root`."""
    source = next(path for file in files.split() if (path := root / file).exists()).read_text()
    node = ast.parse(source)
    for part in name.split("."):
        node = next(line for line in node.body if getattr(line, "name", None) == part)
    return hashlib.sha256(ast.get_source_segment(source, node).encode()).hexdigest()[:16]


@pytest.mark.skipif(SPEC is None, reason="vLLM is not installed: make install-vllm")
@pytest.mark.parametrize(("files", "name"), [(files, name) for files in CONTRACT for name in CONTRACT[files]])
def test_what_is_relied_on_is_what_was_read(files, name):
    now = fingerprint(Path(SPEC.submodule_search_locations[0]), files, name)
    known = CONTRACT[files][name].split()
    assert now in known, f"{name} has changed: read it and whoever relies on it, then add {now}"


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else SPEC.submodule_search_locations[0])
    for files, names in CONTRACT.items():
        for name in names:
            print(name, fingerprint(root, files, name))
