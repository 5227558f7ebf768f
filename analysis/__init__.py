"""The paper's tables with our numbers beside them, drawn from result files; no model is loaded here."""
