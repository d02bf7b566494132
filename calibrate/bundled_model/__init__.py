"""The bundled GPT or Llama in plain torch, and the modules it is made of."""
