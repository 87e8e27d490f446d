"""The room `tokens`: tokenizers, templates, pieces, canaries."""
