"""The package `tokens`: tokenizers, templates, segments, canaries."""
