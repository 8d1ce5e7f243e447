"""Parts of `cohort.checkpoint`: what is saved of tensors, optimizers and generators. Private."""
