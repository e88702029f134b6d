"""reward_model against transformers' own forward of one text at a time, on tiny models made here."""

import datetime
import json
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.patience import patient
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from grpox.errors import ConfigError
from grpox.testing import RewardConformance
from grpox.testing.runner import outcomes
from grpox_rewards.configs import RewardModelConfig
from grpox_rewards.reward_model import RewardModel

LETTERS = "abcdefgh<>/"
VOCABULARY = {name: i for i, name in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *LETTERS])}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEMPLATE = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}{{ suffix | default('') }}"


def reward_model(**settings):
    return RewardModel(RewardModelConfig(**settings))


def opened_by(token):
    special = [(token, VOCABULARY[token])]
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=special)


def tokenizer(template=None, pad=None):
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    core.post_processor = opened_by("<bos>")
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token=pad
    )
    made.chat_template = template
    return made


def llama(**changes):
    torch.manual_seed(0)
    settings = {"vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32, "num_labels": 1}
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, **settings | changes)).eval()


@pytest.fixture
def saved(tmp_path):
    def save(model, **kinds):
        model.save_pretrained(tmp_path / "judge")
        tokenizer(**kinds).save_pretrained(tmp_path / "judge")
        return str(tmp_path / "judge")

    return save


def alone(model, *texts, special=True):
    """The model's scores of texts that it reads one at a time."""
    bos = [VOCABULARY["<bos>"]] if special else []
    with torch.no_grad():
        rows = [torch.tensor([[*bos, *(VOCABULARY[letter] for letter in text)]]) for text in texts]
        return [model(input_ids=row).logits[0, 0].item() for row in rows]


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES, vocab_size=64, num_labels=1)).eval()


TEXTS = ["abc", "cdefgh", "abcdefa", "abc", "hbb", "abc"]
PAIRS = {"prompts": [text[:1] for text in TEXTS], "completions": [text[1:] for text in TEXTS]}


@pytest.mark.parametrize(
    ("model", "pad", "batch_size"),
    [
        # The checkpoint declares no padding token, as Llama's do not.
        *((llama(), None, size) for size in (1, 2, 3, 8)),
        (llama(pad_token_id=VOCABULARY["<pad>"]), "<pad>", 16),
        (bert(), "<pad>", 16),
    ],
)
def test_a_batch_scores_each_text_as_the_model_does_alone(saved, model, pad, batch_size):
    reward = reward_model(model=saved(model, pad=pad), batch_size=batch_size)
    scores = reward(**PAIRS)
    assert scores == pytest.approx(alone(model, *TEXTS), abs=1e-6)
    assert len({round(score, 4 if pad is None else 9) for score in scores}) == 4
    # Equal texts score equally to the last bit, whatever batch they fall into.
    assert scores[0] == scores[3] == scores[5]
    assert reward._model.config.pad_token_id == (None if pad is None else VOCABULARY[pad])


def test_messages_go_through_the_models_own_chat_template_without_further_special_tokens(saved):
    model = llama()
    folder = saved(model, template=TEMPLATE)
    arguments = {
        "prompts": [[{"role": "user", "content": "ab"}]],
        "completions": [[{"role": "assistant", "content": "cd"}]],
    }
    plain = reward_model(model=folder)
    assert plain(**arguments) == pytest.approx(alone(model, "<ab><cd>", special=False), abs=1e-6)
    suffixed = reward_model(model=folder, chat_template_kwargs={"suffix": "/"})
    assert suffixed(**arguments) == pytest.approx(alone(model, "<ab><cd>/", special=False), abs=1e-6)
    # A beginning and the completion are one turn.
    model = llama()
    question, begun = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}
    reward = reward_model(model=saved(model, template=TEMPLATE))
    scores = reward(prompts=[[question, begun]], completions=[[{"role": "assistant", "content": "d"}]])
    assert scores == pytest.approx(alone(model, "<ab><cd>", special=False), abs=1e-6)


def test_a_long_text_loses_its_left_end_but_not_its_special_token_and_is_counted(saved):
    model, logged = llama(max_position_embeddings=8), {}
    reward = reward_model(model=saved(model), max_length=4)
    scores = reward(prompts=["abcd", "a"], completions=["ef", "b"], log_metric=logged.__setitem__)
    assert scores == pytest.approx(alone(model, "def", "ab"), abs=1e-6)
    assert logged == {"reward_model/cut": 0.5}
    reward = reward_model(model=saved(model))  # the model's positions are the default limit
    scores = reward(prompts=["a" * 20], completions=["bcdefgh"], log_metric=logged.__setitem__)
    assert scores == pytest.approx(alone(model, "bcdefgh"), abs=1e-6)
    assert logged == {"reward_model/cut": 1.0}


def test_two_threads_at_once_score_as_one(saved):
    reward = reward_model(model=saved(llama(attention_dropout=0.5)))  # which no score carries
    expected = reward(**PAIRS)
    inside, second = [], threading.Event()

    def wait(*_):
        inside.append(threading.current_thread())
        if len(inside) == 1:
            second.wait(0.3)  # which must not come in, but if it did would end after the first
        else:
            second.set()
            inside[0].join(patient(60))

    reward._model.register_forward_pre_hook(wait)
    found = []
    threads = [threading.Thread(target=lambda: found.append(reward(**PAIRS))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (llama(num_labels=2), "must have one output"),
        (LlamaForCausalLM(llama().config), r"score\.weight"),  # its head would be random
    ],
)
def test_a_model_that_cannot_score_is_refused(saved, model, told):
    with pytest.raises(ConfigError, match=told):
        reward_model(model=saved(model))


@pytest.mark.parametrize("kind", ["bert", "qwen2"])
def test_a_tokenizer_without_tokens_is_refused(kind, tmp_path):
    """Without a vocabulary, transformers makes a tokenizer that knows special tokens alone."""

    config = AutoConfig.for_model(kind, **SIZES, vocab_size=64, num_labels=1, num_key_value_heads=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no token but the special ones") as refused:
        reward_model(model=str(tmp_path))
    assert refused.value.problems[0].given == str(tmp_path)


def test_bfloat16_is_the_dtype_of_the_weights_and_messages_need_a_chat_template(saved):
    reward = reward_model(model=saved(llama()), dtype="bfloat16")
    assert reward._model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="has no chat template"):
        reward(prompts=[[{"role": "user", "content": "a"}]], completions=[[]])
    assert isinstance(reward(prompts=["a"], completions=["b"])[0], float)


def test_it_conforms(saved):

    component = {"name": "reward_model", "model": saved(llama())}
    suite = type("Suite", (RewardConformance,), {"component": component})
    assert {outcome.check: outcome.what for outcome in outcomes(suite()) if outcome.status == "failed"} == {}


@pytest.fixture
def adapter(tmp_path):
    """The folders of a language model and of a trained adapter for it, which brings the head."""
    import torch
    from transformers import LlamaForCausalLM

    peft = pytest.importorskip("peft")
    language_model = LlamaForCausalLM(llama().config)
    language_model.save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    base = type(llama()).from_pretrained(tmp_path / "base", num_labels=1)
    torch.manual_seed(3)
    settings = {"target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_CLS", "init_lora_weights": False}
    wrapped = peft.get_peft_model(base, peft.LoraConfig(**settings)).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    return wrapped, tmp_path / "adapter"


def test_an_adapters_folder_is_loaded_with_its_base_model_and_needs_its_head(adapter):
    wrapped, folder = adapter
    # Merged weights differ from an adapter beside them by rounding.
    expected = [pytest.approx(score, abs=1e-5) for score in alone(wrapped, "ab", "abcd")]
    assert reward_model(model=str(folder))(prompts=["a", "ab"], completions=["b", "cd"]) == expected
    # Without a head or a base model it is refused.
    _, folder = adapter
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({k: v for k, v in weights.items() if "score" not in k}, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"score\.weight"):
        reward_model(model=str(folder))
    told = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(told | {"base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="names no base model"):
        reward_model(model=str(folder))


def test_another_tokenizer(saved, tmp_path):
    """The other tokenizer opens with <eos> instead of <bos>, which the model's own would write."""
    model = llama()
    folder = saved(model)
    other = tokenizer()
    other.backend_tokenizer.post_processor = opened_by("<eos>")
    other.save_pretrained(tmp_path / "other")
    scores = reward_model(model=folder, tokenizer=str(tmp_path / "other"))(prompts=["a"], completions=["b"])
    assert scores == alone(model, ["<eos>", "a", "b"], special=False)
    assert scores != reward_model(model=folder)(prompts=["a"], completions=["b"])


def test_a_completion_cannot_write_a_special_token_and_the_template_has_the_date_of_the_run(saved):
    """The text of <eos> is read as text, and a plain prompt with the BOS has one."""
    model = llama()
    folder = saved(model, template=TEMPLATE + "{{ strftime_now('%b') | lower | first }}")
    scorer = reward_model(model=folder)
    assert scorer(prompts=["<bos>a"], completions=["<eos>"]) == alone(
        model, ["a", *"<e", "<unk>", "<unk>", ">"]
    )
    scorer.chat.set_day(datetime.date(2020, 2, 1))
    (score,) = scorer(
        prompts=[[{"role": "user", "content": "a"}]], completions=[[{"role": "assistant", "content": "b"}]]
    )
    assert [score] == alone(model, "<a><b>f", special=False)


def test_a_message_that_the_models_own_template_drops_is_refused(saved):
    template = TEMPLATE.replace("%}", "if m['role'] != 'system' %}", 1)
    config = RewardModelConfig(model=saved(llama(), template=template))
    prompt = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
    [problem] = config.check_prompts([prompt[1:], prompt])
    assert problem.key == "model"
    assert "message 0" in problem.what
    assert config.check_prompts([prompt[1:]]) == []
    with pytest.raises(ValueError, match="message 0"):
        reward_model(model=config.model)(
            prompts=[prompt], completions=[[{"role": "assistant", "content": "a"}]]
        )
