#!/usr/bin/env python3
"""One-step gradient oracle for group-relative policy gradients and on-policy distillation.

The oracle is TRL's own trainers (GRPOTrainer, RLOOTrainer, DistillationTrainer, experimental
IWOPDTrainer), fed a fixed set of prompts, completions and rewards on a tiny deterministic Llama; the
gradient is read just before the optimizer step.  A candidate trainer is given the same step and must
produce the same gradient, whatever order the rewards arrive in.

  emit    needs trl; runs TRL on every case and writes the table of expected values
              python gradient_oracle.py emit --out expected.json
  self    needs trl; TRL against the small streaming reference in this file, prints the errors
              python gradient_oracle.py self [--only SUBSTRING]
  export  no trl; writes the step's inputs as files for a candidate that is a program
              python gradient_oracle.py export --dir DIR
  check   no trl; compares a candidate with the table, exit status 1 on any miss
              python gradient_oracle.py check                               (the reference in this file)
              python gradient_oracle.py check --callable pkg.mod:function
              python gradient_oracle.py check --command 'prog --case {case} --out {out}'
              python gradient_oracle.py check --permute 3   also under 3 arrival orders

Candidate contract
  --callable  f(case: dict, model: LlamaForCausalLM, aux: LlamaForCausalLM | None) -> {name: gradient}
  --command   is run once a case; {case} is a directory holding case.json, model/ (HF format,
              float32) and, where the case has one, aux/ (reference policy or teacher);
              it writes {out} as a .safetensors (or torch .pt) of {parameter name: gradient}.
  The gradient is that of the *minimised* loss (what one SGD step with lr 1 would subtract).
  Tied embeddings have one entry, model.embed_tokens.weight.

case.json
  kind        'pg' | 'opd'
  loss_type   grpo | dr_grpo | dapo | bnpo | rloo | (opd) jsd | sampled
  scale_rewards  group | batch | none          num_generations, max_completion_length
  beta        KL weight (pg: to aux; rloo: k1 inside the reward); opd jsd: 0 forward, 1 reverse KL
  kl_form     k3 = exp(d)-d-1, d = ref-logp | unbiased = k3 * exp(logp - detached logp), TRL's default
  std_eps     1e-4; standard deviations are unbiased (n-1)
  tis_max     >0: token weight min(exp(logp - sampling_logp), tis_max), detached
  entropy_coef
  rollouts[]  group, index, prompt[], completion[], mask[] (1 = policy token), reward, sampling_logps[]
  arrival[]   order in which rewards become known (indices into rollouts)

Tolerances (float32): every projection and every tensor norm within rtol of the gradient's norm
(default 2e-5); cases with a reward offset get their own looser bound only on TRL's side, since TRL
itself computes rewards and statistics in float32 (see 'trl_floor' in a case).
"""

import argparse, json, math, os, subprocess, sys, tempfile, zlib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
TABLE = HERE / "expected.json"
VOCAB, PAD, EOS, STD_EPS = 97, 0, 1, 1e-4


# ----------------------------------------------------------------------------- the fixed step
def tiny_model(seed, hidden=32, layers=2):
    """Weights from numpy's frozen legacy stream, so they do not move with torch's initialisers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
        use_cache=False,
    )
    m = LlamaForCausalLM(cfg).float().eval()
    with torch.no_grad():
        for n, p in m.named_parameters():
            x = np.random.RandomState((zlib.crc32(n.encode()) + seed) % 2**32).standard_normal(tuple(p.shape))
            x = 1 + 0.1 * x if "norm" in n else x * (0.35 if "embed" in n else 1.2 / math.sqrt(p.shape[-1]))
            p.copy_(torch.tensor(x, dtype=torch.float32))
    return m


def make_case(
    name,
    kind="pg",
    loss_type="grpo",
    scale_rewards="group",
    num_generations=4,
    n_prompts=3,
    beta=0.0,
    rewards="cont",
    masked=False,
    tis_max=0.0,
    entropy_coef=0.0,
    micro=False,
    temperature=1.0,
    kl_form="unbiased",
    seed=0,
):
    rs = np.random.RandomState(1234 + seed)
    ro = []
    for k in range(n_prompts):
        prompt = rs.randint(3, VOCAB, size=rs.randint(4, 9)).tolist()
        for j in range(num_generations):
            n = int(rs.randint(5, 17))
            c = rs.randint(3, VOCAB, size=n).tolist()
            mask = [1] * n
            if masked and n >= 8:  # an environment observation inside the completion
                mask[3:6] = [0, 0, 0]
            u = float(rs.random_sample())
            r = {
                "cont": round(u, 4),
                "bin": float(u < 0.5),
                "offset": 1000.0 + round(4 * u) / 4,
                "equal": 0.1 if k == 0 else round(u, 4),
            }[rewards]
            ro.append(
                dict(
                    group=k,
                    index=j,
                    prompt=prompt,
                    completion=c,
                    mask=mask,
                    reward=r,
                    sampling_logps=(-4.5 + 0.8 * rs.standard_normal(n)).round(4).tolist(),
                )
            )
    arrival = rs.permutation(len(ro)).tolist()
    return dict(
        name=name,
        kind=kind,
        loss_type=loss_type,
        scale_rewards=scale_rewards,
        beta=beta,
        num_generations=num_generations,
        max_completion_length=20,
        std_eps=STD_EPS,
        tis_max=tis_max,
        entropy_coef=entropy_coef,
        temperature=temperature,
        micro=micro,
        kl_form=kl_form,
        rollouts=ro,
        arrival=arrival,
        aux="teacher" if kind == "opd" else ("ref" if beta else ""),
    )


def cases():
    out = []
    for n in (4, 8):
        for lt in ("grpo", "dr_grpo", "dapo", "bnpo"):
            for sc in ("group", "batch", "none"):
                out.append(make_case(f"{lt}-{sc}-n{n}", loss_type=lt, scale_rewards=sc, num_generations=n))
    out += [make_case(f"{lt}-masked", loss_type=lt, masked=True) for lt in ("grpo", "dr_grpo", "dapo")]
    out += [
        make_case(f"{lt}-kl-{f}", loss_type=lt, beta=0.04, kl_form=f)
        for lt in ("grpo", "dapo")
        for f in ("unbiased", "k3")
    ]
    out += [make_case(f"{lt}-tis", loss_type=lt, tis_max=2.0) for lt in ("grpo", "dapo")]
    out += [
        make_case("grpo-entropy", entropy_coef=0.01),
        make_case("grpo-binary", rewards="bin", num_generations=8),
        make_case("grpo-equal-group", rewards="equal"),  # one group has no signal: must contribute 0
        make_case("grpo-offset1000", rewards="offset"),  # rewards 1000 + {0, .25, .5, .75, 1}
        make_case("dr_grpo-offset1000", loss_type="dr_grpo", scale_rewards="none", rewards="offset"),
        make_case("grpo-micro", micro=True),
        make_case("dapo-micro", loss_type="dapo", micro=True),
        make_case("grpo-temp0.7", temperature=0.7),
        make_case("rloo-n4", loss_type="rloo"),
        make_case("rloo-n8", loss_type="rloo", num_generations=8),
        make_case("rloo-kl", loss_type="rloo", beta=0.05),
    ]
    out += [
        make_case(f"opd-jsd{b}", kind="opd", loss_type="jsd", beta=b, num_generations=1, n_prompts=6)
        for b in (1.0, 0.0, 0.5)
    ]
    out += [make_case("opd-sampled", kind="opd", loss_type="sampled", num_generations=1, n_prompts=6)]
    return out


def aux_model(case):
    if case["aux"] == "teacher":
        return tiny_model(77, hidden=48)
    if case["aux"] == "ref":
        m, z = tiny_model(7), tiny_model(99)
        with torch.no_grad():
            for p, q in zip(m.parameters(), z.parameters()):
                p.lerp_(q, 0.1)
        return m
    return None


# ----------------------------------------------------------------------------- TRL side
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    t = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=t, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )


def trl_gradient(case, lr_check=False):
    """Runs one TRL training step on the case; returns {name: gradient}."""
    from datasets import Dataset
    from transformers import TrainerCallback
    import transformers, trl

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ro, n = case["rollouts"], case["num_generations"]
    n_prompts = len(ro) // n
    grads = {}

    class Grab(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kw):
            for k, p in model.named_parameters():
                if p.grad is not None:
                    grads[k] = p.grad.detach().clone()

    with tempfile.TemporaryDirectory() as tmp:
        tiny_model(7).save_pretrained(f"{tmp}/model")
        tok = tokenizer()
        tok.save_pretrained(f"{tmp}/model")
        bs = n if case["micro"] else len(ro)
        common = dict(
            output_dir=f"{tmp}/out",
            per_device_train_batch_size=bs,
            max_steps=1,
            learning_rate=1.0,
            gradient_accumulation_steps=len(ro) // bs,
            max_grad_norm=0.0,
            use_cpu=True,
            bf16=False,
            fp16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            seed=0,
        )
        seen = {}

        def take(prompt):  # prompt text 'p<k>' -> its next rollout, in order
            k = int(str(prompt)[1:])
            j = seen.get(k, 0)
            seen[k] = j + 1
            return ro[k * n + j]

        data = Dataset.from_dict({"prompt": [f"p{k}" for k in range(n_prompts)]})
        student = transformers.AutoModelForCausalLM.from_pretrained(f"{tmp}/model", dtype=torch.float32)
        sgd = (torch.optim.SGD(student.parameters(), lr=1.0), None)
        if case["kind"] == "pg" and case["loss_type"] != "rloo":

            def rollout_func(prompts, trainer):
                rs = [take(p) for p in prompts]
                d = dict(
                    prompt_ids=[r["prompt"] for r in rs],
                    completion_ids=[r["completion"] for r in rs],
                    logprobs=[r["sampling_logps"] for r in rs],
                    fixed=[r["reward"] for r in rs],
                )
                if any(0 in r["mask"] for r in rs):
                    d["env_mask"] = [r["mask"] for r in rs]
                return d

            cfg = trl.GRPOConfig(
                **common,
                loss_type=case["loss_type"],
                scale_rewards=case["scale_rewards"],
                num_generations=n,
                max_completion_length=case["max_completion_length"],
                beta=case["beta"],
                entropy_coef=case["entropy_coef"],
                num_iterations=1,
                use_bias_correction_kl=case["kl_form"] == "unbiased",
                temperature=case["temperature"],
                vllm_importance_sampling_mode="token_truncate",
                vllm_importance_sampling_clip_max=case["tis_max"] or 3.0,
            )
            t = trl.GRPOTrainer(
                model=student,
                args=cfg,
                train_dataset=data,
                processing_class=tok,
                reward_funcs=lambda completions, fixed, **kw: fixed,
                rollout_func=rollout_func,
                callbacks=[Grab()],
                optimizers=sgd,
            )
            if case["tis_max"]:  # the vLLM-mismatch branch, without a vLLM
                import types

                t.use_vllm, t.vllm_importance_sampling_correction = True, True
                t.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
                t._last_loaded_step = 0
        elif case["kind"] == "pg":

            class T(trl.RLOOTrainer):
                def _generate_single_turn(self, prompt_ids, *a, **k):
                    return [r["completion"] for r in self._fixed]

                def _tokenize_prompts(self, prompts):
                    self._fixed = [take(p) for p in prompts]
                    return [r["prompt"] for r in self._fixed], None, {}

                def _calculate_rewards(self, *a, **k):
                    return torch.tensor([[r["reward"]] for r in self._fixed])

            cfg = trl.RLOOConfig(
                **common,
                num_generations=n,
                beta=case["beta"],
                num_iterations=1,
                max_completion_length=case["max_completion_length"],
                reward_clip_range=None,
                normalize_advantages=False,
            )
            t = T(
                model=student,
                args=cfg,
                train_dataset=data,
                processing_class=tok,
                reward_funcs=lambda completions, **kw: [0.0] * len(completions),
                callbacks=[Grab()],
                optimizers=sgd,
            )
        elif case["loss_type"] == "jsd":

            class T(trl.DistillationTrainer):
                def _generate_single_turn(self, prompt_ids, *a, **k):
                    return [r["completion"] for r in self._fixed]

                def _tokenize_prompts(self, prompts):
                    self._fixed = [take(p) for p in prompts]
                    return [r["prompt"] for r in self._fixed], None, {}

            cfg = trl.DistillationConfig(
                **common,
                beta=case["beta"],
                temperature=case["temperature"],
                max_completion_length=case["max_completion_length"],
            )
            t = T(
                model=student,
                teacher_model=aux_model(case),
                args=cfg,
                train_dataset=data,
                processing_class=tok,
                callbacks=[Grab()],
                optimizers=sgd,
            )
        else:  # TRL's sampled-token loss, called on its own logits
            from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
            import types
            from collections import defaultdict

            fake = types.SimpleNamespace(
                temperature=case["temperature"],
                iw_opd_gamma=0.0,
                iw_opd_epsilon=1e-8,
                model=student,
                _metrics=defaultdict(lambda: defaultdict(list)),
            )
            teacher, T_ = aux_model(case), sum(sum(r["mask"]) for r in ro)
            for r in ro:
                ids = torch.tensor([r["prompt"] + r["completion"]])
                m = len(r["completion"])
                sl = student(ids).logits[:, -m - 1 : -1]
                with torch.no_grad():
                    tl = teacher(ids).logits[:, -m - 1 : -1].log_softmax(-1)
                lab = torch.tensor([r["completion"]])
                IWOPDTrainer._compute_iw_opd_loss(
                    fake,
                    sl,
                    lab,
                    lab,
                    tl.gather(-1, lab[..., None])[..., 0],
                    num_items_in_batch=torch.tensor(float(T_)),
                ).backward()
            return {k: p.grad.clone() for k, p in student.named_parameters()}
        if case["kind"] == "pg" and case["beta"]:  # TRL's reference starts equal to the policy: replace it
            t.ref_model.load_state_dict(aux_model(case).state_dict())
        for cb in (transformers.PrinterCallback, transformers.ProgressCallback):
            t.remove_callback(cb)
        t.model.eval()
        before = {k: p.detach().clone() for k, p in t.model.named_parameters()}
        t.train()
        if lr_check:  # one SGD step with lr 1 moved the weights by -gradient
            for k, p in t.model.named_parameters():
                d = (before[k] - p.detach() - grads[k]).abs().max() / grads[k].abs().max().clamp(min=1e-30)
                assert d < 1e-2, (case["name"], k, float(d))
    return grads


# ----------------------------------------------------------------------------- streaming reference
def _logps(model, r, temperature):
    n = len(r["completion"])
    ids = torch.tensor([r["prompt"] + r["completion"]])
    lp = (model(ids).logits[0, -n - 1 : -1].float() / temperature).log_softmax(-1)
    return lp, lp.gather(-1, torch.tensor(r["completion"])[:, None])[:, 0]


def streaming_reference(case, model, aux=None, order=None, acc=torch.float32):
    """Backward per rollout, in arrival order, before its group is complete.

    Per open group k:  R_k = sum (r_i - b_k) g_i,  P_k = sum g_i,  b_k = the first reward seen.
    On close:          S  += c_k (R_k - (mu_k - b_k) P_k).
    Terms whose weight is known at backward (KL, entropy, distillation) go to a direct accumulator D.
    Step constants (token totals, batch std) multiply once, at step close.
    """
    ro, lt, n = case["rollouts"], case["loss_type"], case["num_generations"]
    order = case["arrival"] if order is None else order
    par = [(k, p) for k, p in model.named_parameters()]
    zeros = lambda: {k: torch.zeros_like(p, dtype=acc) for k, p in par}
    S, D, R, P, base, rew, sink = zeros(), zeros(), {}, {}, {}, {}, {}

    def hook(name):
        def h(p):
            for buf, a in sink["to"]:
                buf[name].add_(p.grad.to(acc), alpha=a)
            p.grad = None

        return h

    handles = [p.register_post_accumulate_grad_hook(hook(k)) for k, p in par]
    N, T = len(ro), sum(sum(r["mask"]) for r in ro)
    allr = []
    for i in order:
        r, k = ro[i], ro[i]["group"]
        lp, sel = _logps(model, r, case["temperature"])
        m = torch.tensor(r["mask"], dtype=torch.float32)
        L = float(m.sum())
        w = {"grpo": 1 / L, "dr_grpo": 1 / case["max_completion_length"], "rloo": 1.0}.get(lt, 1.0)
        if case["kind"] == "opd":  # no group: straight to D, divided by T at close
            with torch.no_grad():
                tlp, tsel = _logps(aux, r, case["temperature"])
            if lt == "sampled":
                loss = -(sel * (tsel - sel.detach()) * m).sum()
            else:
                b, q, p_ = case["beta"], lp, tlp
                if b == 1.0:
                    d = (q.exp() * (q - p_)).sum(-1)
                elif b == 0.0:
                    d = (p_.exp() * (p_ - q)).sum(-1)
                else:
                    mix = torch.logsumexp(torch.stack([q + math.log1p(-b), p_ + math.log(b)]), 0)
                    d = b * (p_.exp() * (p_ - mix)).sum(-1) + (1 - b) * (q.exp() * (q - mix)).sum(-1)
                loss = (d * m).sum()
            sink["to"] = [(D, 1.0)]
            loss.backward()
            continue
        rr = r["reward"]
        if case["beta"]:
            with torch.no_grad():
                ref = _logps(aux, r, case["temperature"])[1]
            if lt == "rloo":
                rr = rr - case["beta"] * float(((sel.detach() - ref) * m).sum())
        if k not in R:
            R[k], P[k], base[k], rew[k] = zeros(), zeros(), rr, []
        phi = sel
        if case["tis_max"]:
            s = torch.tensor(r["sampling_logps"])
            phi = phi * (sel.detach() - s).exp().clamp(max=case["tis_max"])
        extra = 0.0
        if case["beta"] and lt != "rloo":
            k3 = (ref - sel).exp() - (ref - sel) - 1
            if case["kl_form"] == "unbiased":  # TRL's default: k3 times the (differentiable) ratio,
                k3 = k3 * (sel - sel.detach()).exp()  # whose on-policy gradient is (logp - ref) grad logp
            extra = extra + case["beta"] * (k3 * m).sum() * w
        if case["entropy_coef"]:  # TRL: mean over the batch's tokens, for every loss type
            wt = {"grpo": N / T, "dr_grpo": N / T}.get(lt, 1.0)
            extra = extra - case["entropy_coef"] * ((-(lp.exp() * lp).sum(-1)) * m).sum() * wt
        sink["to"] = [(R[k], rr - base[k]), (P[k], 1.0)]
        ((phi * m).sum() * w).backward(retain_graph=torch.is_tensor(extra))
        if torch.is_tensor(extra):
            sink["to"] = [(D, 1.0)]
            extra.backward()
        rew[k].append(rr)
        allr.append(rr)
        if len(rew[k]) == n:  # group close
            v = np.array(rew[k], dtype=np.float64)
            sd = v.std(ddof=1)
            if lt == "rloo":
                c = n / (n - 1)
            elif case["scale_rewards"] == "group":
                c = 0.0 if sd == 0 else 1 / (sd + case["std_eps"])
            else:
                c = 1.0
            Rk, Pk, d = R.pop(k), P.pop(k), float(v.mean() - base[k])
            for name, _ in par:
                S[name].sub_(Rk[name].sub_(Pk[name], alpha=d), alpha=c)
    C = 1 / T if lt in ("dapo", "bnpo", "jsd", "sampled") else 1 / N
    B = 1.0
    if case["kind"] == "pg" and lt != "rloo" and case["scale_rewards"] == "batch":
        B = 1 / (np.std(allr, ddof=1) + case["std_eps"])
    for h in handles:
        h.remove()
    return {k: ((S[k] * B + D[k]) * C).float() for k, _ in par}


# ----------------------------------------------------------------------------- comparison
def sketch(g):
    """Norms and two fixed Gaussian projections: enough to pin a gradient down in a committed table."""
    out = dict(norm=math.sqrt(sum(float((x.double() ** 2).sum()) for x in g.values())), tensors={})
    for j in range(4):
        out[f"proj{j}"] = sum(
            float(
                (
                    x.double().cpu().numpy()
                    * np.random.RandomState((zlib.crc32(k.encode()) + j) % 2**32).standard_normal(tuple(x.shape))
                ).sum()
            )
            for k, x in g.items()
        )
    for k, x in g.items():
        out["tensors"][k] = float(x.double().norm())
    return json.loads(json.dumps(out), parse_float=lambda s: float(f"{float(s):.9g}"))


def compare(sk, ex):
    """Largest deviation over projections and tensor norms, relative to the gradient's norm."""
    n = ex["norm"]
    dev = [abs(sk[f"proj{j}"] - ex[f"proj{j}"]) / n for j in range(4)] + [abs(sk["norm"] - n) / n]
    if set(sk["tensors"]) != set(ex["tensors"]):
        return float("inf")
    return max(dev + [abs(sk["tensors"][k] - v) / n for k, v in ex["tensors"].items()])


def rel(a, b):
    d = math.sqrt(sum(float(((a[k] - b[k]).double() ** 2).sum()) for k in b))
    t = max(float((a[k] - b[k]).abs().max() / b[k].abs().max().clamp(min=1e-30)) for k in b)
    return d / math.sqrt(sum(float((b[k].double() ** 2).sum()) for k in b)), t


def export(case, d):
    d = Path(d)
    d.mkdir(parents=True, exist_ok=True)
    (d / "case.json").write_text(json.dumps(case))
    tiny_model(7).save_pretrained(d / "model")
    tokenizer().save_pretrained(d / "model")
    a = aux_model(case)
    if a is not None:
        a.save_pretrained(d / "aux")


def run_command(cmd, case):
    with tempfile.TemporaryDirectory() as tmp:
        export(case, tmp)
        for ext in ("safetensors", "pt"):
            if f".{ext}" in cmd or "{out}" in cmd:
                break
        out = f"{tmp}/grad.safetensors"
        subprocess.run(cmd.format(case=tmp, out=out), shell=True, check=True)
        if not os.path.exists(out) and os.path.exists(f"{tmp}/grad.pt"):
            return torch.load(f"{tmp}/grad.pt")
        from safetensors.torch import load_file

        return load_file(out)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=["emit", "self", "export", "check"])
    ap.add_argument("--out", default=str(TABLE))
    ap.add_argument("--expected", default=str(TABLE))
    ap.add_argument("--only", default="")
    ap.add_argument("--dir")
    ap.add_argument("--callable")
    ap.add_argument("--command")
    ap.add_argument("--permute", type=int, default=0)
    ap.add_argument("--rtol", type=float, default=2e-5)
    a = ap.parse_args()
    torch.set_num_threads(1)
    cs = [c for c in cases() if a.only in c["name"]]
    if a.what == "export":
        for c in cs:
            export(c, Path(a.dir) / c["name"])
        return 0
    if a.what in ("emit", "self"):
        import trl, transformers

        table = dict(trl=trl.__version__, torch=torch.__version__, transformers=transformers.__version__, cases={})
        for c in cs:
            g = trl_gradient(c, lr_check=a.what == "self")
            s = streaming_reference(c, tiny_model(7), aux_model(c))
            l2, mx = rel(s, g)
            print(
                f"{c['name']:22s} |g|={sketch(g)['norm']:.6g}  streaming vs TRL: l2 {l2:.2e}  tensor-max {mx:.2e}",
                flush=True,
            )
            table["cases"][c["name"]] = dict(sketch(g), trl_floor=float(f"{l2:.1e}"))
        if a.what == "emit":
            Path(a.out).write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        return 0
    table = json.loads(Path(a.expected).read_text())["cases"]
    cs = [c for c in cs if c["name"] in table]  # the table may hold a part of the cases
    f = lambda c, m, x: streaming_reference(c, m, x)
    if a.callable:
        import importlib

        mod, fn = a.callable.split(":")
        f = getattr(importlib.import_module(mod), fn)
    bad = 0
    for c in cs:
        for t in range(1 + a.permute):
            if t:
                c = dict(c, arrival=np.random.RandomState(t).permutation(len(c["rollouts"])).tolist())
            g = run_command(a.command, c) if a.command else f(c, tiny_model(7), aux_model(c))
            e = table[c["name"]]
            d = compare(sketch(g), e)
            tol = max(a.rtol, 3 * e["trl_floor"])
            ok = d <= tol
            bad += not ok
            print(
                f"{'ok  ' if ok else 'MISS'} {c['name']:22s} order {t}  deviation {d:.2e}  (allowed {tol:.1e})",
                flush=True,
            )
    print(f"{sum(1 + a.permute for _ in cs) - bad} passed, {bad} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
