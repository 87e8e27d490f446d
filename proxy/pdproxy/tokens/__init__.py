"""Prompts become token ids here, as the engines would make them: chat templates, tokenizers, canaries. Pure but for loading."""
