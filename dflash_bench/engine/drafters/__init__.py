"""What is proposed in a round? One file a method; the loop judges whatever they say."""
