"""The model families an engine imports at start (SGLang's external model package); others are still found, by a slower full import."""
