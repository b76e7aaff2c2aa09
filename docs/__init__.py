"""The documentation: pages in Markdown, and what writes the tables in them."""
