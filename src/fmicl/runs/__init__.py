"""Run folders: layout, export, embeddings, figures and the HTML report."""
