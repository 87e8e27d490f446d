"""Makes the token ids of prompts as engines do: chat templates, tokenizers, canaries. Pure except
for loading.
"""
