"""contenders"""
