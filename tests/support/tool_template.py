"""A chat template that describes tools, for models whose own describes none."""

from pathlib import Path

HERMES = """
{%- if tools %}{{ '<|system|>Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- ' Answer with <tool_call>' }}{% endif %}
{%- for message in messages %}{{ '<|' + message.role + '|>' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}
{%- endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

_TEMPLATE_FILE = "chat_template.jinja"


def with_tools(model: Path, folder: Path) -> Path:
    """A folder with the files of a model, and this template.

    Args:
        folder: is made.
    """
    folder.mkdir(parents=True)
    for file in model.resolve().iterdir():
        if file.name != _TEMPLATE_FILE:
            (folder / file.name).symlink_to(file)
    (folder / _TEMPLATE_FILE).write_text(HERMES)
    return folder
