"""IFEval: lm-eval's own task on a merged model, resumable and without network."""
