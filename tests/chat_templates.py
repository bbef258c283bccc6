"""Chat templates of published chat models, shortened by declared tools and images.

| here | of | what is left out |
|---|---|---|
| GPT2 | ChatML; no GPT-2 was published with it | |
| GPT_NEOX | Zephyr 7B, StableLM Zephyr | |
| QWEN2 | Qwen2.5-Instruct | declared tools, `tool_calls` |
| QWEN3 | Qwen3 | the same, and the field `reasoning_content` |
| QWEN3_5 | Qwen3.5, 4B and larger | the same, and images |
| LLAMA3 | Llama 3.1 Instruct | declared tools, `tool_calls` |
| LLAMA2 | Llama 2 Chat | |
| MISTRAL | Mistral 7B Instruct v0.3 | tools and their results |
| GEMMA2 | Gemma 2 it | |
| GEMMA3 | Gemma 3 it | images |
| PHI3 | Phi 3 mini 4k instruct | |
| OLMO2 | OLMo 2 7B SFT and Instruct | |
| OLMO3 | Olmo 3 Instruct, `olmo` of open-instruct | declared functions and calls |
| SMOLLM3 | SmolLM3 without thinking | declared tools, the header's dates |
| GRANITE | Granite 3 instruct | tools, documents, thinking, the default system |

Each was compared with the published text on 2026-11-25: those of Qwen, Llama 3, Gemma
and Phi with the copies in `trl/chat_templates` of github.com/huggingface/trl, commit
f2cd577, those of Llama 2, Mistral and Zephyr with copies in other public repositories.
Conversations of system, user, assistant and, but for Mistral, tool results came out as
the same text, letter by letter. Those of OLMo 2, Olmo 3, SmolLM3, Granite and Qwen3.5
are written after copies in other public repositories, on 2026-11-28.
"""

from typing import NamedTuple


class Template(NamedTuple):
    """A template, its tokens, and the features of its conversations."""

    text: str
    special: tuple[str, ...]
    stop: str
    """Ends the assistant's turn."""
    bos: str | None = None
    system: bool = True
    """Whether the template accepts a system message."""
    tools: str = ""
    """The role of tool results; "" if the template has none."""
    opening: str = ""
    """The text that begins a requested turn, but not a completed one."""


GPT2 = Template(
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
)
GPT_NEOX = Template(  # whose roles are ordinary text
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n"
    "{% endif %}\n{% endfor %}",
    ("<|endoftext|>",),
    "<|endoftext|>",
)
QWEN2 = Template(
    """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. ' }}
    {{- 'You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
        {{- '\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    tools="tool",
)
QWEN3 = Template(
    """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1] %}
            {%- set reasoning_content = reasoning_content.lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index
            and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' }}
            {{- reasoning_content.strip('\n') + '\n</think>\n\n' }}
            {{- content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    tools="tool",
)
QWEN3_5 = Template(
    """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content | trim + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set content = message.content | trim %}
        {%- if not(content.startswith('<tool_response>')
            and content.endswith('</tool_response>')) %}
            {%- set ns.multi_step_tool = false %}
            {%- set ns.last_query_index = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if ns.multi_step_tool %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<think>\n' + thought | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
""",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    tools="tool",
    opening="<think>\n",
)
LLAMA3 = Template(
    """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool') %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
""",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
    bos="<|begin_of_text|>",
    tools="ipython",
)
_ALTERNATE = (
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/"
    "assistant/...') }}"
)
LLAMA2 = Template(
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    f"{_ALTERNATE}{{% endif %}}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + "
    "message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>"),
    "</s>",
    bos="<s>",
)
MISTRAL = Template(  # where [INST] and [/INST] are tokens
    "{%- if messages[0]['role'] == 'system' %}"
    "{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}"
    "{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}"
    "{%- for message in loop_messages %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    f"{_ALTERNATE}{{%- endif %}}"
    "{%- if message['role'] == 'user' %}"
    "{%- if loop.last and system_message is defined %}"
    "{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}{%- endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    "</s>",
    bos="<s>",
)
GEMMA2 = Template(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    f"{_ALTERNATE}{{% endif %}}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<end_of_turn>",
    bos="<bos>",
    system=False,
)
GEMMA3 = Template(
    """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        """
    + _ALTERNATE
    + """
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
""",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<end_of_turn>",
    bos="<bos>",
)
PHI3 = Template(
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% else %}{{ eos_token }}{% endif %}",
    ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "<|end|>",
)

OLMO2 = Template(  # whose roles are ordinary text
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}"
    "{% elif message['role'] == 'assistant' %}{% if not loop.last %}"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}{% else %}"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    "{% endfor %}",
    ("<|endoftext|>",),
    "<|endoftext|>",
    bos="<|endoftext|>",
)
OLMO3 = Template(
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are OLMo, a "
    "helpful function-calling AI assistant built by Ai2. Your date cutoff is November "
    "2024, and your model weights are available at https://huggingface.co/allenai. You "
    "do not currently have access to any functions. <functions></functions><|im_end|>"
    "\n' }}{% endif %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|im_start|>system\n' + message['content'] + ' You do not currently have "
    "access to any functions. <functions></functions><|im_end|>\n' }}"
    "{% elif message['role'] in ('user', 'environment') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' "
    "}}{% elif message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + message['content'] }}"
    "{% if not loop.last %}{{ '<|im_end|>' + '\n' }}{% else %}{{ eos_token }}"
    "{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}{% endfor %}",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    tools="environment",
)
SMOLLM3 = Template(  # whose system message has no end without tools
    """{{- "<|im_start|>system\n## Custom Instructions\n\n" -}}
{%- if messages[0].role == "system" -%}
    {{- messages[0].content.rstrip() + "\n\n" -}}
{%- else -%}
    {{- "You are a helpful AI assistant named SmolLM, trained by Hugging Face.\n\n" -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role in ("user", "tool") -%}
        {{ "<|im_start|>user\n" + message.content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n"
           + message.content.lstrip("\n") + "<|im_end|>\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" }}
{%- endif -%}
""",
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    tools="tool",
)
GRANITE = Template(
    "{% for message in messages %}{{ '<|start_of_role|>' + message['role'] + "
    "'<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    "<|end_of_text|>",
)

# The families of models/families; Llama has two, of its second and third generation.
FAMILIES = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "granite": GRANITE,
    "llama": LLAMA3,
    "llama_2": LLAMA2,
    "mistral": MISTRAL,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_5": QWEN3_5,
    "smollm3": SMOLLM3,
}
