"""vLLM v1: conversion of its KV cache groups, edits, and the connector."""
