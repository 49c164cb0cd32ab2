"""Generation by SGLang servers, over HTTP."""
