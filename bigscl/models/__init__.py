"""Networks: any classifier with its linear layer applied to every cell of the feature map."""
