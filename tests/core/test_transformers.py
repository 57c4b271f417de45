"""Hugging Face models with their experts on megamoe: Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss, tiny and random.

Judged against the model in float32 with the same routing: our logits may be off by at most 1.5 times what the untouched bf16 model is off.
"""

import copy
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import megamoe
from megamoe.testing.launcher import launch

transformers = pytest.importorskip("transformers", reason="needs the extra megamoe-core[transformers]")

from megamoe.integrations import expert_layouts  # noqa: E402
from megamoe.integrations.transformers import MegaMoEExperts, close_experts, replace_experts  # noqa: E402

COMMON = {
    "vocab_size": 32,  # so few that the largest logit stands out: which positions are clear must not hang on a CPU's way of summing
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def mixtral():
    return transformers.MixtralConfig(**COMMON, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2)


def qwen3_moe():
    return transformers.Qwen3MoeConfig(
        **COMMON, intermediate_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=4, head_dim=32, norm_topk_prob=True
    )


def deepseek_v3():
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5}
    common = COMMON | {"num_key_value_heads": 4, "num_hidden_layers": 3}
    return transformers.DeepseekV3Config(
        **common, **sizes, **routing, intermediate_size=256, moe_intermediate_size=128, first_k_dense_replace=1, num_mtp_layers=0
    )


def gpt_oss():
    # A limit that the tiny model's values reach: their real 7.0 would clamp nothing here.
    return transformers.GptOssConfig(
        **COMMON, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, head_dim=32, swiglu_limit=0.6, sliding_window=8
    )


FAMILIES = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3, "gpt_oss": gpt_oss}
BLOCKS = {"mixtral": 2, "qwen3_moe": 2, "deepseek_v3": 2, "gpt_oss": 2}


def make(family):
    """The model in float32; its weights are bf16 values, so that bf16 copies hold the same weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name:  # initialized with zeros
                tensor.normal_(std=0.3)
            if "inv_freq" not in name:
                tensor.copy_(tensor.bfloat16())
    return model


def tokens(rank=0, shape=(3, 24)):
    return torch.randint(1, COMMON["vocab_size"], shape, generator=torch.Generator().manual_seed(40 + rank))


def routers(model):
    return [m for _, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")]


@contextmanager
def recorded(model):
    """Keeps what the routers answer."""
    answers = []
    hooks = [router.register_forward_hook(lambda module, args, out: answers.append(out)) for router in routers(model)]
    yield answers
    for hook in hooks:
        hook.remove()


@contextmanager
def routed(model, answers):
    """Lets the routers answer with recorded experts and weights, the weights in the type that the model's own have."""
    queue = iter(answers)

    def answer(module, args, out):
        logits, weights, ids = next(queue)
        return logits.to(out[0].dtype), weights.to(out[1].dtype), ids

    hooks = [router.register_forward_hook(answer) for router in routers(model)]
    yield
    for hook in hooks:
        hook.remove()
    assert next(queue, None) is None, "a router was not asked"


@dataclass
class Errors:
    """Of logits against the float32 model's, ours and the untouched bf16 model's; then what greedy decoding makes of ours.

    Attributes:
        rms, worst: (ours, untouched), root mean square and largest.
        clear: share of positions whose float32 top-2 margin exceeds 4 times our largest error.
        agree: the greedy token is the float32 model's at all of these.
    """

    rms: tuple[float, float]
    worst: tuple[float, float]
    clear: float
    agree: bool

    @property
    def ratio(self):
        return max(self.rms[0] / self.rms[1], self.worst[0] / self.worst[1])


@torch.no_grad()
def compare(family, rank=0, group=None, backend="reference", device="cpu"):
    exact = make(family).to(device)
    ids = tokens(rank, (3, 24 + 8 * rank)).to(device)
    with recorded(exact) as answers:
        want = exact(ids).logits
    plain = copy.deepcopy(exact).to(torch.bfloat16)
    ours = replace_experts(copy.deepcopy(plain), max_tokens=256, backend=backend, group=group)
    assert sum(isinstance(m, MegaMoEExperts) for m in ours.modules()) == BLOCKS[family]
    logits = {}
    for name, model in (("ours", ours), ("plain", plain)):
        with routed(model, answers):
            logits[name] = model(ids).logits.float()
    close_experts(ours)
    off = {name: value - want for name, value in logits.items()}
    rms = tuple(off[name].square().mean().sqrt().item() for name in ("ours", "plain"))
    worst = tuple(off[name].abs().max().item() for name in ("ours", "plain"))
    top = want.topk(2, dim=-1).values
    clear = top[..., 0] - top[..., 1] > 4 * worst[0]
    same = logits["ours"].argmax(-1) == want.argmax(-1)
    return Errors(rms, worst, clear.float().mean().item(), bool(same[clear].all()))


def check(errors):
    assert 0 < errors.ratio <= 1.5, errors
    assert errors.clear >= 0.5, errors
    assert errors.agree, errors


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_against_float32(family):
    check(compare(family))


@pytest.mark.sm90
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_against_float32_through_sm90(family):
    check(compare(family, backend="sm90", device="cuda"))


@pytest.mark.parametrize(
    ("family", "name", "wrong"),
    [
        ("gpt_oss", "_halves", lambda rows: rows),
        ("gpt_oss", "_bias", lambda bias: None),
        ("gpt_oss", "activation", lambda experts: megamoe.SwiGLU(alpha=experts.alpha, up_bias=1.0)),
        ("gpt_oss", "activation", lambda experts: megamoe.SwiGLU(limit=experts.limit, up_bias=1.0)),
        ("gpt_oss", "activation", lambda experts: megamoe.SwiGLU(limit=experts.limit, alpha=experts.alpha)),
        ("mixtral", "activation", lambda experts: megamoe.SwiGLU(alpha=1.702)),
        ("mixtral", "read", lambda experts, slots: READ(experts, [*slots[1:], slots[0]])),
    ],
    ids=["interleave", "biases", "limit", "alpha", "up_bias", "silu", "order"],
)
def test_a_wrong_layout_shows_in_the_logits(family, name, wrong, monkeypatch):
    monkeypatch.setattr(expert_layouts, name, wrong)
    assert compare(family).ratio > 2


READ = expert_layouts.read


def on_rank(rank):
    return [compare(family, rank, dist.group.WORLD) for family in FAMILIES]


def test_logits_on_two_ranks():
    for results in launch(on_rank, 2, timeout=240):
        for errors in results:
            check(errors)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_own_router_and_generation(family):
    """Nothing fixed: the replaced model generates, and its cached decoding is its own full forward, token by token."""
    model = make(family).to(torch.bfloat16)
    replace_experts(model, max_tokens=256, backend="reference")
    prompt = tokens(shape=(2, 6))
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert out.shape == (2, 14)
    logits = model(out[:, :-1]).logits.float()[:, 5:]
    top = logits.topk(2, dim=-1).values
    clear = top[..., 0] - top[..., 1] > 0.1 * logits.std()
    assert clear.float().mean() > 0.5
    assert (logits.argmax(-1) == out[:, 6:])[clear].all()
    close_experts(model)
    close_experts(model)
    with pytest.raises(megamoe.SessionClosed):
        model(prompt)


@torch.no_grad()
def test_everything_else_stays():
    model = make("deepseek_v3").to(torch.bfloat16)
    before = {name: p for name, p in model.named_parameters() if ".experts." not in name}
    assert any("shared_experts" in name for name in before)
    replace_experts(model, max_tokens=16, backend="reference")
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    close_experts(model)


@pytest.mark.parametrize("format", ["fp8_block128", "mxfp8", "nvfp4"])
@torch.no_grad()
def test_quantized_when_taken_over(format):
    exact = make("qwen3_moe")
    ids = tokens()
    with recorded(exact) as answers:
        want = exact(ids).logits
    with replaced(copy.deepcopy(exact).to(torch.bfloat16), format=format) as ours, routed(ours, answers):
        off = (ours(ids).logits.float() - want).square().mean().sqrt() / want.std()
    assert 0.005 < off < {"fp8_block128": 0.06, "mxfp8": 0.08, "nvfp4": 0.25}[format]


@contextmanager
def replaced(model, **more):
    replace_experts(model, max_tokens=128, backend="reference", **more)
    try:
        yield model
    finally:
        close_experts(model)


@torch.no_grad()
def test_fp8_checkpoint_passes_through():
    """Experts of an FP8 checkpoint are used code by code: the layer equals one made of the same codes."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    model = make("deepseek_v3").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    kept = []
    for layer in model.model.layers[1:]:
        experts = FP8Experts(model.config, block_size=(128, 128))
        for name, parameter in experts.named_parameters():
            value = torch.rand(parameter.shape, generator=generator) * (0.01 if "scale" in name else 8) + (0.001 if "scale" in name else -4)
            parameter.copy_(value.to(parameter.dtype))
        layer.mlp.experts = experts
        kept.append(experts)
    some = expert_layouts.read(kept[0], [5, 2])
    for name, whole in (("w13", "gate_up_proj"), ("w2", "down_proj"), ("w13_scale", "gate_up_proj_scale_inv")):
        taken, source = getattr(some, name), getattr(kept[0], whole)
        assert all((a.view(torch.uint8) == source[e].view(torch.uint8)).all() for a, e in zip(taken, (5, 2), strict=True))
    with pytest.raises(megamoe.InvalidInput, match="fp8_block128"):
        replace_experts(model, max_tokens=128, backend="reference")
    with replaced(model, format="fp8_block128"):
        x = torch.randn(5, 128, generator=generator).bfloat16()
        ids, weights = torch.tensor([[0, 1, 2]] * 5), torch.rand(5, 3)
        for layer, experts in zip(model.model.layers[1:], kept, strict=True):
            want = torch.zeros(5, 128, dtype=torch.float64)
            for k, e in enumerate(ids[0].tolist()):
                gate_up, down = (
                    w[e].double() * s[e].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
                    for w, s in ((experts.gate_up_proj, experts.gate_up_proj_scale_inv), (experts.down_proj, experts.down_proj_scale_inv))
                )
                gate, up = (x.double() @ gate_up.T).chunk(2, dim=1)
                want += weights[:, k, None] * ((gate / (1 + torch.exp(-gate)) * up) @ down.T)
            got = layer.mlp.experts(x, ids, weights)
            # Only activations are rounded: half a step of E4M3 at most, twice.
            assert (got.double() - want).norm() / want.norm() < 0.06


@torch.no_grad()
def test_float32_and_leading_dimensions():
    model = make("mixtral")
    block = model.model.layers[0].mlp
    x = torch.randn(2, 3, 128)
    want = block(x)
    with replaced(model):
        got = block(x)
    assert got.dtype == torch.float32
    assert got.shape == (2, 3, 128)
    assert (got - want).norm() / want.norm() < 0.01


# ---------------------------------------------------------------------------------------------------- refusals


def test_refused_before_anything_changes():
    model = make("qwen3_moe").to(torch.bfloat16)
    kinds = [type(m) for m in model.modules()]
    for error, match, arguments in [
        (megamoe.InvalidInput, "fp8_tensor", {"format": "fp8_tensor"}),
        (megamoe.InvalidInput, "max_tokens", {"max_tokens": 0}),
        (megamoe.BackendNotFound, "nonesuch", {"backend": "nonesuch"}),
        (megamoe.UnsupportedProblem, "2 ranks", {"placement": megamoe.Placement.even(8, 2)}),
        (megamoe.InvalidInput, "not a format", {"format": "int3"}),
    ]:
        with pytest.raises(error, match=match):
            replace_experts(model, **({"max_tokens": 64, "backend": "reference"} | arguments))
        assert [type(m) for m in model.modules()] == kinds


def test_models_without_known_experts_are_refused():
    config = transformers.LlamaConfig(**COMMON | {"hidden_size": 64}, intermediate_size=64)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(megamoe.InvalidInput, match="LlamaForCausalLM has no experts that megamoe knows"):
        replace_experts(model, max_tokens=64)
    other = make("mixtral")
    type_of = type("HomeMadeExperts", (torch.nn.Module,), {})
    other.model.layers[1].mlp.experts = type_of()
    with pytest.raises(megamoe.InvalidInput, match="HomeMadeExperts"):
        replace_experts(other, max_tokens=64)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda block: setattr(block.experts, "act_fn", torch.nn.GELU()), "GELU"),
        (lambda block: setattr(block.experts, "gate_up_proj", torch.nn.Parameter(block.experts.gate_up_proj[:4])), "4 of 8"),
        (lambda block: block.experts.to("meta"), "meta"),
        (lambda block: setattr(block.gate, "top_k", None), "top_k"),
    ],
    ids=["activation", "sharded", "offloaded", "router"],
)
def test_blocks_that_cannot_be_read_are_refused(change, match):
    model = make("qwen3_moe").to(torch.bfloat16)
    change(model.model.layers[1].mlp)
    with pytest.raises(megamoe.InvalidInput, match=match):
        replace_experts(model, max_tokens=64, backend="reference")
    assert not any(isinstance(m, MegaMoEExperts) for m in model.modules())


def test_too_many_tokens():
    model = make("mixtral").to(torch.bfloat16)
    replace_experts(model, max_tokens=8, backend="reference")
    with torch.no_grad(), pytest.raises(megamoe.InvalidInput, match="max_tokens=8"):
        model(tokens(shape=(1, 9)))
    close_experts(model)
