"""What the Megatron backend plugs into megatron-core. Nothing here imports it before it is used."""
