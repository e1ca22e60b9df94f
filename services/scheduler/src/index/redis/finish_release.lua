-- KEYS[1] meta
-- ARGV[1] owner  [2] field of meta  [3] value
-- Returns 'OK', 'FENCED', or 'GAP' if the shard has no checkpoint. Then nothing has changed.
local meta = redis.call('HMGET', KEYS[1], 'owner', 'offset')
if meta[1] ~= ARGV[1] and (meta[1] or meta[2]) then
  return {'FENCED'}
elseif not meta[2] then
  return {'GAP'}
end
-- A full Redis never refuses HDEL, and refuses no write of a script that has already written.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
return {'OK'}
