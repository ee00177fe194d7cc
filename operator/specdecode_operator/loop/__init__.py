"""When and where passes run, never what they do."""
