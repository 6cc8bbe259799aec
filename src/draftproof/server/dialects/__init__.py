"""How families of models write calls of tools: the text, the grammar and the reader of each dialect."""
