"""TileLang fused templates, importable as fusescout.templates."""
