"""The model classes an engine imports at start (SGLang's external model package): any other family is still found, by a slower full import."""
