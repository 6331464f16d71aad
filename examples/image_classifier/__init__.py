"""EfficientNet-lite0 names photos: JPEG or PNG in, one of ImageNet's 1,000 classes out."""
