"""What an operator needs: options, connections, logs, metrics, the page, and a model made ready."""
