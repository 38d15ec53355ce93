"""kvpack engines as models of lm-eval (EleutherAI's lm-evaluation-harness); see `export.lm_eval.model`."""
