"""Names of formats, as settings have them; ``formats.py`` has the formats."""

AUTO, NONE = "auto", "none"
CALL_CHOICES = (
    *(AUTO, NONE),
    *("mistral", "glm", "qwen3_coder", "phi4", "granite", "hermes", "llama3"),
)
REASONING_CHOICES = (AUTO, NONE, "think", "mistral")
