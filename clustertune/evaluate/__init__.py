"""lm-eval's tasks on a merged model, resumable and without network."""
