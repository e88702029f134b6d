"""reward_model against transformers' own forward of one text at a time, on tiny models made here."""

import threading

import pytest
from support.patience import patient

from grpox.errors import ConfigError
from grpox_rewards.configs import RewardModelConfig

LETTERS = "abcdefgh<>/"
VOCABULARY = {name: i for i, name in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *LETTERS])}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEMPLATE = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}{{ suffix | default('') }}"


def reward_model(**settings):
    from grpox_rewards.reward_model import RewardModel

    return RewardModel(RewardModelConfig(**settings))


def tokenizer(template=None, pad=None):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", VOCABULARY["<bos>"])]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token=pad
    )
    made.chat_template = template
    return made


def llama(**changes):
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

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
    import torch

    bos = [VOCABULARY["<bos>"]] if special else []
    with torch.no_grad():
        rows = [torch.tensor([[*bos, *(VOCABULARY[letter] for letter in text)]]) for text in texts]
        return [model(input_ids=row).logits[0, 0].item() for row in rows]


PROMPTS, COMPLETIONS = ["ab", "c", "abcdef", "h"], ["c", "defgh", "a", "bb"]
TEXTS = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_a_batch_scores_each_text_as_the_model_does_alone(saved, batch_size):
    """The checkpoint declares no padding token, as Llama's do not."""
    model = llama()
    reward = reward_model(model=saved(model), batch_size=batch_size)
    scores = reward(prompts=PROMPTS, completions=COMPLETIONS)
    assert scores == pytest.approx(alone(model, *TEXTS), abs=1e-6)
    assert len({round(score, 4) for score in scores}) == 4
    assert reward._model.config.pad_token_id is None


def test_a_declared_padding_token_is_used(saved):
    model = llama(pad_token_id=VOCABULARY["<pad>"])
    reward = reward_model(model=saved(model, pad="<pad>"))
    scores = reward(prompts=PROMPTS, completions=COMPLETIONS)
    assert scores == pytest.approx(alone(model, *TEXTS), abs=1e-6)


def test_an_encoder_reads_padded_batches_as_it_reads_texts_alone(saved):
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, vocab_size=64, num_labels=1)).eval()
    reward = reward_model(model=saved(model, pad="<pad>"))
    scores = reward(prompts=PROMPTS, completions=COMPLETIONS)
    assert scores == pytest.approx(alone(model, *TEXTS), abs=1e-6)


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


def test_messages_without_a_chat_template_are_refused(saved):
    reward = reward_model(model=saved(llama()))
    with pytest.raises(ValueError, match="has no chat template"):
        reward(prompts=[[{"role": "user", "content": "a"}]], completions=[[]])


def test_a_long_text_loses_its_left_end_but_not_its_special_token_and_is_counted(saved):
    model, logged = llama(), {}
    reward = reward_model(model=saved(model), max_length=4)
    scores = reward(prompts=["abcd", "a"], completions=["ef", "b"], log_metric=logged.__setitem__)
    assert scores == pytest.approx(alone(model, "def", "ab"), abs=1e-6)
    assert logged == {"reward_model/cut": 0.5}


def test_the_models_positions_are_the_default_limit(saved):
    model, logged = llama(max_position_embeddings=8), {}
    reward = reward_model(model=saved(model))
    scores = reward(prompts=["a" * 20], completions=["bcdefgh"], log_metric=logged.__setitem__)
    assert scores == pytest.approx(alone(model, "bcdefgh"), abs=1e-6)
    assert logged == {"reward_model/cut": 1.0}


def test_scores_are_the_same_in_a_thread_and_carry_no_dropout(saved):
    model = llama(attention_dropout=0.5)
    reward = reward_model(model=saved(model))
    found = []
    arguments = {"prompts": PROMPTS, "completions": COMPLETIONS}
    thread = threading.Thread(target=lambda: found.append(reward(**arguments)))
    thread.start()
    thread.join()
    assert found == [reward(**arguments)]


def test_two_threads_at_once_score_as_one(saved):
    reward = reward_model(model=saved(llama()))
    arguments = {"prompts": PROMPTS, "completions": COMPLETIONS}
    expected = reward(**arguments)
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
    threads = [threading.Thread(target=lambda: found.append(reward(**arguments))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]


def test_a_model_with_several_outputs_is_refused(saved):
    with pytest.raises(ConfigError, match="must have one output"):
        reward_model(model=saved(llama(num_labels=2)))


def test_a_model_whose_head_would_be_random_is_refused(saved):
    from transformers import LlamaConfig, LlamaForCausalLM

    causal = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64, num_labels=1))
    with pytest.raises(ConfigError, match=r"score\.weight"):
        reward_model(model=saved(causal))


@pytest.mark.parametrize("kind", ["bert", "qwen2"])
def test_a_tokenizer_without_tokens_is_refused(kind, tmp_path):
    """Without a vocabulary, transformers makes a tokenizer that knows special tokens alone."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(kind, **SIZES, vocab_size=64, num_labels=1, num_key_value_heads=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no token but the special ones") as refused:
        reward_model(model=str(tmp_path))
    assert refused.value.problems[0].given == str(tmp_path)


def test_bfloat16_is_the_dtype_of_the_weights(saved):
    import torch

    reward = reward_model(model=saved(llama()), dtype="bfloat16")
    assert reward._model.dtype == torch.bfloat16
    assert isinstance(reward(prompts=["a"], completions=["b"])[0], float)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_equal_texts_score_equally_to_the_last_bit_whatever_batch_they_fall_into(saved, batch_size):
    reward = reward_model(model=saved(llama()), batch_size=batch_size)
    texts = ["ab", "abcab", "ab", "a", "ab", "abc", "ab"]
    scores = reward(prompts=["c"] * 7, completions=texts)
    assert len({score for score, text in zip(scores, texts, strict=True) if text == "ab"}) == 1


def test_it_conforms(saved):
    from grpox.testing import RewardConformance
    from grpox.testing.runner import outcomes

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


def test_an_adapters_folder_is_loaded_with_its_base_model(adapter):
    wrapped, folder = adapter
    # Merged weights differ from an adapter beside them by rounding.
    expected = [pytest.approx(score, abs=1e-5) for score in alone(wrapped, "ab", "abcd")]
    assert reward_model(model=str(folder))(prompts=["a", "ab"], completions=["b", "cd"]) == expected


def test_an_adapter_without_a_head_or_a_base_model_is_refused(adapter):
    import json

    from safetensors.torch import load_file, save_file

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
    from tokenizers import processors

    model = llama()
    folder = saved(model)
    other = tokenizer()
    other.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", VOCABULARY["<eos>"])]
    )
    other.save_pretrained(tmp_path / "other")
    scores = reward_model(model=folder, tokenizer=str(tmp_path / "other"))(prompts=["a"], completions=["b"])
    assert scores == alone(model, ["<eos>", "a", "b"], special=False)
    assert scores != reward_model(model=folder)(prompts=["a"], completions=["b"])


def test_a_completion_cannot_write_a_special_token_and_the_template_has_the_date_of_the_run(saved):
    """The text of <eos> is read as text, and a plain prompt with the BOS has one."""
    import datetime

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


def test_a_beginning_and_the_completion_are_one_turn_for_the_model(saved):
    model = llama()
    question, begun = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}
    reward = reward_model(model=saved(model, template=TEMPLATE))
    scores = reward(prompts=[[question, begun]], completions=[[{"role": "assistant", "content": "d"}]])
    assert scores == pytest.approx(alone(model, "<ab><cd>", special=False), abs=1e-6)


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
